"""What the engine's OpenAI server says of itself, against what was given and heard."""

from collections.abc import Iterator

from router.tools.doctor.advice import caching_flag, name_of
from router.tools.doctor.engine_seen import EngineSeen
from router.tools.doctor.findings import Finding, ok, unknown, warning, wrong
from router.tools.doctor.server import ServerSeen


def server_findings(seen: EngineSeen) -> Iterator[Finding]:
    """Nothing where none was named."""
    server = seen.server
    if server is None:
        return
    if server.problem is not None:
        why = "requests are sent there, and the model's name is learned there"
        fix = "give --url as http://host:port of the engine's OpenAI server"
        yield wrong("server", f"{server.url}: {server.problem}", why, fix)
        return
    version = f" {server.version}" if server.version else ""
    yield ok("server", f"{name_of(server.engine)}{version} at {server.url}")
    yield _model(seen, server)
    yield from _cache(seen, server)


def _model(seen: EngineSeen, server: ServerSeen) -> Finding:
    asked = seen.config.model
    adapters = [name for name, parent in server.models.items() if parent is not None]
    names = ", ".join(server.models)
    if asked and asked not in server.models:
        why = "requests for a model are only placed on workers registered under its name"
        fix = "register the name that --served-model-name gives, or change that"
        return wrong("model", f"{asked!r} is not served (but {names or 'none'})", why, fix)
    if asked in adapters:
        why = "adapters are told by lora_name in a request, and share their base's worker"
        fix = f"register {server.models[asked]!r}, and send lora_name {asked!r}"
        return wrong("model", f"{asked!r} is an adapter", why, fix)
    if not asked and server.base_model is None:
        return unknown("model", f"several are served: {names or 'none'}", "give --model")
    also = f"; adapters: {', '.join(adapters)}" if adapters else ""
    return ok("model", f"{asked or server.base_model}{also}")


def _cache(seen: EngineSeen, server: ServerSeen) -> Iterator[Finding]:
    if server.has_prefix_caching is False:
        why = "nothing is reused, so that no choice of worker helps"
        text = "prefix caching is switched off"
        yield wrong("prefix caching", text, why, caching_flag(server.engine))
    if server.facts.block_size is None:
        text = "its metrics do not say how its cache is made"
        yield unknown("cache config", text, "vLLM: start without --disable-log-stats")
        return
    room = "" if server.facts.total_kv_blocks is None else f"{server.facts.total_kv_blocks} "
    text = f"{room}blocks of {server.facts.block_size} tokens"
    told = seen.block_size
    if told is not None and told != server.facts.block_size:
        why = "the events decide; hybrid models and context parallelism make them differ"
        fix = f"register block_size {told}"
        yield warning("cache config", f"{text}; events say {told}", why, fix)
    else:
        yield ok("cache config", text)
