"""What became of the probe's requests."""

from collections.abc import Iterator

from router.tools.doctor.advice import caching_flag, events_flag, name_of
from router.tools.doctor.engine_seen import EngineSeen
from router.tools.doctor.findings import Finding, ok, unknown, warning, wrong
from router.tools.doctor.probe_seen import ProbeSeen, RequestSeen


def probe_findings(seen: EngineSeen) -> Iterator[Finding]:
    """Nothing where none was sent."""
    probe = seen.probe
    if probe is None:
        return
    plain = probe.requests["plain"]
    if plain.problem is not None:
        yield unknown("probe", f"the engine refuses: {plain.problem}", "give --model and --url")
        return
    again = probe.requests["again"]
    yield _announced(seen, plain, again)
    yield _reused(seen, again)
    if again.announced_blocks:
        yield _salted(seen, probe)
        yield _chat(probe)


def _announced(seen: EngineSeen, plain: RequestSeen, again: RequestSeen) -> Finding:
    if plain.blocks and plain.announced_blocks == plain.blocks:
        text = f"a prompt of {plain.blocks} blocks was announced, token by token"
        return ok("probe", text)
    if again.blocks and again.announced_blocks == again.blocks:
        text = f"a prompt of {again.blocks} blocks was announced, but only with the next request"
        why = "what an idle engine does not publish cannot be used"
        return warning("probe", text, why, f"upgrade {name_of(seen.engine)}")
    why = "the router would take this engine's cache to be empty"
    if plain.other_blocks and not plain.announced_blocks:
        text = f"{plain.other_blocks} blocks were announced, none with the prompt's tokens"
        fix = "--zmq and --url must be of one engine and rank"
        return wrong("probe", text, why, fix)
    if plain.cached_tokens:
        text = f"its prompt was cached already: {plain.cached_tokens} tokens"
        return unknown("probe", text, "try again")
    if plain.announced_blocks:
        text = f"{plain.announced_blocks} of a prompt's {plain.blocks} blocks were announced"
        return warning("probe", text, why, "see live events, sequence")
    flag = events_flag(seen.engine, seen.config.zmq, seen.config.replay)
    fix = f"{flag}; {caching_flag(seen.engine)}; --zmq and --url must be of one engine and rank"
    return wrong("probe", "a prompt was served, and nothing was announced", why, fix)


def _reused(seen: EngineSeen, again: RequestSeen) -> Finding:
    if again.cached_tokens is None:
        text = again.problem or "the engine does not say what it reused"
        return unknown("reuse", text, "vLLM: start with --enable-prompt-tokens-details")
    if again.cached_tokens:
        return ok("reuse", f"the same prompt again: {again.cached_tokens} tokens from the cache")
    why = "nothing is reused, so that no choice of worker helps"
    text = "the same prompt again: nothing from the cache"
    return wrong("reuse", text, why, caching_flag(seen.engine))


def _salted(seen: EngineSeen, probe: ProbeSeen) -> Finding:
    salted = probe.requests["salted"]
    name = name_of(seen.engine)
    if salted.problem is not None:
        return unknown("salt", f"a request with cache_salt is refused: {salted.problem}")
    if probe.salt in salted.salts:
        return ok("salt", "a salted prompt has blocks of its own, and their events name the salt")
    if salted.announced_blocks:
        why = "blocks of one tenant would be counted for every other"
        fix = f"upgrade {name} (vLLM: 0.16 or later), or send no cache_salt"
        return wrong("salt", "blocks of a salted prompt are announced without it", why, fix)
    if salted.cached_tokens:
        why = "the router would predict a cold start where the engine reuses another's blocks"
        text = f"cache_salt is ignored: {salted.cached_tokens} tokens from the unsalted cache"
        return warning("salt", text, why, f"upgrade {name}, or send no cache_salt")
    return unknown("salt", "a salted prompt was served, and nothing was announced")


def _chat(probe: ProbeSeen) -> Finding:
    chat = probe.requests.get("chat")
    if chat is None or probe.template_tokens is None:
        text = "the engine has no /tokenize for chats"
        return unknown("chat template", text, "hash what its own template and tokenizer give")
    if chat.problem is not None:
        return unknown("chat template", f"a chat is refused: {chat.problem}")
    if chat.announced_blocks:
        return ok(
            "chat template",
            f"it adds {probe.template_tokens} tokens, and events are of the whole: "
            "callers must apply it before they hash (POST /tokenize with messages)",
        )
    why = "callers who hash what /tokenize says would never match"
    text = "the tokens of a chat's events are not those of /tokenize"
    fix = "hash the tokens that the engine computes: same template, same options"
    return (
        wrong("chat template", text, why, fix)
        if chat.other_blocks
        else unknown("chat template", "a chat was served, and nothing was announced")
    )
