"""Checks of the results of the probe's requests."""

from collections.abc import Iterator

from router.tools.doctor.findings import (
    Finding,
    caching_flag,
    events_flag,
    name_of,
    ok,
    unknown,
    warning,
    wrong,
)
from router.tools.doctor.observed_engine import ObservedEngine
from router.tools.doctor.observed_probe import ObservedProbe, ObservedRequest


def probe_findings(seen: ObservedEngine) -> Iterator[Finding]:
    """Yield the findings on the probe; none if no request was sent."""
    probe = seen.probe
    if probe is None:
        return
    plain = probe.requests["plain"]
    if plain.problem is not None:
        yield unknown("probe", f"the engine rejected it: {plain.problem}", "give --model and --url")
        return
    again = probe.requests["again"]
    yield _announced(seen, plain, again)
    yield _reused(seen, again)
    if again.announced_blocks:
        yield _salted(seen, probe)
        yield _chat(probe)


def _announced(seen: ObservedEngine, plain: ObservedRequest, again: ObservedRequest) -> Finding:
    if plain.blocks and plain.announced_blocks == plain.blocks:
        text = f"a prompt of {plain.blocks} blocks was published, token by token"
        return ok("probe", text)
    if again.blocks and again.announced_blocks == again.blocks:
        text = f"a prompt of {again.blocks} blocks was published, but only with the next request"
        why = "what an idle engine does not publish cannot be used"
        return warning("probe", text, why, f"upgrade {name_of(seen.engine)}")
    why = "the router would consider this engine's cache empty"
    if plain.other_blocks and not plain.announced_blocks:
        text = f"{plain.other_blocks} blocks were published, none with the prompt's tokens"
        fix = "--zmq and --url must be of one engine and rank"
        return wrong("probe", text, why, fix)
    if plain.cached_tokens:
        text = f"its prompt was cached already: {plain.cached_tokens} tokens"
        return unknown("probe", text, "try again")
    if plain.announced_blocks:
        text = f"{plain.announced_blocks} of a prompt's {plain.blocks} blocks were published"
        return warning("probe", text, why, "see live events, sequence")
    flag = events_flag(seen.engine, seen.config.zmq, seen.config.replay)
    fix = f"{flag}; {caching_flag(seen.engine)}; --zmq and --url must be of one engine and rank"
    return wrong("probe", "a prompt was served, but no event was published", why, fix)


def _reused(seen: ObservedEngine, again: ObservedRequest) -> Finding:
    if again.cached_tokens is None:
        text = again.problem or "the engine does not report reused tokens"
        return unknown("reuse", text, "vLLM: start with --enable-prompt-tokens-details")
    if again.cached_tokens:
        return ok("reuse", f"the same prompt again: {again.cached_tokens} tokens from the cache")
    why = "without reuse no choice of worker helps"
    text = "the same prompt again: nothing from the cache"
    return wrong("reuse", text, why, caching_flag(seen.engine))


def _salted(seen: ObservedEngine, probe: ObservedProbe) -> Finding:
    salted = probe.requests["salted"]
    name = name_of(seen.engine)
    if salted.problem is not None:
        return unknown("salt", f"a request with cache_salt was rejected: {salted.problem}")
    if probe.salt in salted.salts:
        return ok("salt", "a salted prompt has separate blocks, and their events contain the salt")
    if salted.announced_blocks:
        why = "blocks of one tenant would be counted for every other"
        fix = f"upgrade {name} (vLLM: 0.16 or later), or send no cache_salt"
        return wrong("salt", "blocks of a salted prompt are published without the salt", why, fix)
    if salted.cached_tokens:
        why = "the router would predict no reuse where the engine reuses another tenant's blocks"
        text = f"cache_salt is ignored: {salted.cached_tokens} tokens from the unsalted cache"
        return warning("salt", text, why, f"upgrade {name}, or send no cache_salt")
    return unknown("salt", "a salted prompt was served, but no event was published")


def _chat(probe: ObservedProbe) -> Finding:
    chat = probe.requests.get("chat")
    if chat is None or probe.template_tokens is None:
        text = "the engine has no /tokenize for chats"
        return unknown("chat template", text, "hash what its own template and tokenizer give")
    if chat.problem is not None:
        return unknown("chat template", f"a chat was rejected: {chat.problem}")
    if chat.announced_blocks:
        return ok(
            "chat template",
            f"it adds {probe.template_tokens} tokens, and events cover them: "
            "callers must apply it before they hash (POST /tokenize with messages)",
        )
    why = "callers that hash the tokens of /tokenize would never match"
    text = "the tokens of a chat's events are not those of /tokenize"
    fix = "hash the tokens that the engine computes: same template, same options"
    return (
        wrong("chat template", text, why, fix)
        if chat.other_blocks
        else unknown("chat template", "a chat was served, but no event was published")
    )
