"""Checks of the engine's OpenAI server against the settings and the received events."""

from collections.abc import Iterator

from router.discovery.attach.engine_server import ObservedServer
from router.discovery.worker_verdicts import other_model
from router.tools.doctor.findings import Finding, caching_flag, name_of, ok, unknown, warning, wrong
from router.tools.doctor.observed_engine import ObservedEngine


def server_findings(seen: ObservedEngine) -> Iterator[Finding]:
    """Yield the findings on the server; none if no URL is given."""
    server = seen.server
    if server is None:
        return
    if server.problem is not None:
        why = "requests are sent there, and the model's name is taken from it"
        fix = "give --url as http://host:port of the engine's OpenAI server"
        yield wrong("server", f"{server.url}: {server.problem}", why, fix)
        return
    version = f" {server.version}" if server.version else ""
    yield ok("server", f"{name_of(server.engine)}{version} at {server.url}")
    yield _model(seen, server)
    yield from _cache(seen, server)
    if server.drafts_tokens and seen.contents.groups:
        text = "it drafts tokens"
        why = "unless drafts are n-grams, it reuses a block less of each prefix than is cached"
        fix = "register hybrid.eagle_groups, see Hybrid models in docs/attach.md"
        yield warning("drafts", text, why, fix)


def _model(seen: ObservedEngine, server: ObservedServer) -> Finding:
    asked = seen.config.model
    adapters = [name for name, parent in server.models.items() if parent is not None]
    names = ", ".join(server.models)
    other = other_model(asked, server.models) if asked else None
    if other is not None:
        why = "requests for a model are only placed on workers registered under its name"
        fix = "register the name that --served-model-name gives, or change that"
        return wrong("model", other, why, fix)
    if asked in adapters:
        why = "adapters are selected by lora_name in a request, and share their base's worker"
        fix = f"register {server.models[asked]!r}, and send lora_name {asked!r}"
        return wrong("model", f"{asked!r} is an adapter", why, fix)
    if not asked and server.base_model is None:
        return unknown("model", f"several are served: {names or 'none'}", "give --model")
    also = f"; adapters: {', '.join(adapters)}" if adapters else ""
    return ok("model", f"{asked or server.base_model}{also}")


def _cache(seen: ObservedEngine, server: ObservedServer) -> Iterator[Finding]:
    if server.has_prefix_caching is False:
        why = "without reuse no choice of worker helps"
        text = "prefix caching is switched off"
        yield wrong("prefix caching", text, why, caching_flag(server.engine))
    if server.facts.block_size is None:
        text = "its metrics do not contain its cache's geometry"
        yield unknown("cache config", text, "vLLM: start without --disable-log-stats")
        return
    room = "" if server.facts.total_kv_blocks is None else f"{server.facts.total_kv_blocks} "
    text = f"{room}blocks of {server.facts.block_size} tokens"
    event_block_size = seen.block_size
    if event_block_size is not None and event_block_size != server.facts.block_size:
        why = "the events decide; hybrid models and context parallelism make them differ"
        fix = f"register block_size {event_block_size}"
        yield warning("cache config", f"{text}; events contain {event_block_size}", why, fix)
    else:
        yield ok("cache config", text)
