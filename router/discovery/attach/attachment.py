"""An engine at a URL: what is learned of it, as a registration and one sentence.

    http://a:8000[;events=tcp://a:5557][;replay=tcp://a:5657]

Engines name their event sockets by the addresses that they listen on. Of these, wildcards are
reached at the URL's host; addresses of other hosts are followed only if that is allowed, because an
engine could otherwise direct this process to any address.
"""

from collections.abc import Mapping
from types import MappingProxyType
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct

from router.discovery.attach.engine_server import ObservedServer
from router.discovery.attach.event_sockets import RankSockets
from router.errors import InvalidFieldError
from router.protocol.workers import WorkerRegistration
from router.publisher.batch_order.address import rank_endpoint
from router.runtime.process.settings import id_of_name

WILDCARDS = frozenset({"*", "0.0.0.0", "::"})  # noqa: S104 - compared, not bound
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_NAMES: Mapping[str | None, str] = MappingProxyType(
    {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
)
_HAS_SOURCES = (0, 31)
"""The first version of vLLM that names its event sockets."""

MOST_CHARACTERS = 900
"""Limit of an engine's address."""

EVENTS_FLAG = (
    """--kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","""
    """"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}'"""
)


class EngineUrl(Struct, frozen=True):
    """The address of an engine. `events`, `replay`: of its first rank, if the caller names them."""

    url: str
    events: str | None = None
    replay: str | None = None

    @property
    def host(self) -> str:
        """The host."""
        return urlsplit(self.url).hostname or ""

    @property
    def text(self) -> str:
        """The address as `parsed_url` reads it."""
        given = {"events": self.events, "replay": self.replay}
        return self.url + "".join(f";{name}={each}" for name, each in given.items() if each)

    @property
    def worker_id(self) -> int:
        """The id under which it is registered, which follows from the URL."""
        return id_of_name(self.url)


def parsed_url(text: str, field: str) -> EngineUrl:
    """Parse the address of an engine. Raises InvalidFieldError for `field`."""
    url, *options = text.strip().split(";")
    allowed = "http://HOST:PORT or https://HOST:PORT, with ;events= and ;replay= if necessary"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidFieldError(field, f"{url!r}: {error}", allowed) from error
    if parts.username is not None or parts.password is not None:
        reason = f"the URL of {parts.hostname} contains credentials"
        raise InvalidFieldError(field, reason, "worker_token_file for engines that need a key")
    if parts.scheme not in ("http", "https") or not parts.hostname or _is_more(parts):
        raise InvalidFieldError(field, repr(url), allowed)
    if len(text) > MOST_CHARACTERS:
        raise InvalidFieldError(field, f"{len(text)} characters", f"at most {MOST_CHARACTERS}")
    given = dict(option.partition("=")[::2] for option in options)
    if not given.keys() <= {"events", "replay"} or not all(given.values()):
        raise InvalidFieldError(field, repr(text), allowed)
    for endpoint in given.values():
        rank_endpoint(endpoint, 0, field)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    at = host if port is None else f"{host}:{port}"
    return EngineUrl(f"{parts.scheme}://{at}", given.get("events"), given.get("replay"))


def _is_more(parts: SplitResult) -> bool:
    return parts.path not in ("", "/", "/v1", "/v1/") or bool(parts.query or parts.fragment)


class Attachment(Struct, frozen=True):
    """An engine as it is registered, and the sentence about it. `is_up`: its server answered."""

    registration: WorkerRegistration
    sentence: str
    is_up: bool


def attachment(engine: EngineUrl, seen: ObservedServer, *, follows_others: bool) -> Attachment:
    """Return how an engine is registered, from what its server says.

    `follows_others`: sockets on other hosts than the URL's are accepted. A registration without
    what a worker needs is incomplete: it is shown, and not chosen.
    """
    if seen.problem is not None:
        sentence = f"{engine.url}  {_unreachable(seen)}"
        registration = WorkerRegistration(worker_id=engine.worker_id, endpoint=engine.url)
        return Attachment(registration, sentence, is_up=False)
    sockets, about_events = _sockets(engine, seen, follows_others=follows_others)
    rank_count = max(len(sockets), seen.rank_count, 1)
    facts, model = seen.facts, seen.base_model or next(iter(seen.models), None)
    adapters = sorted(name for name, parent in seen.models.items() if parent is not None)
    registration = WorkerRegistration(
        worker_id=engine.worker_id,
        endpoint=engine.url,
        model_name=model or "default",
        engine=seen.engine or "vllm",
        block_size=facts.block_size,
        total_kv_blocks=facts.total_kv_blocks,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        data_parallel_start_rank=min(sockets, default=0),
        data_parallel_size=rank_count,
        lora_names=adapters if seen.engine == "vllm" else None,
        kv_events_endpoints={rank: each.events for rank, each in sockets.items()} or None,
        replay_endpoints={r: each.replay for r, each in sockets.items() if each.replay} or None,
        load_endpoints={r: each.load for r, each in sockets.items() if each.load} or None,
        topic=next((each.topic for each in sockets.values() if each.topic), None),
    )
    parts = [_kind(seen), model or "no model", _sizes(seen, rank_count)]
    if seen.aliases:
        parts.append(f"also named {', '.join(seen.aliases)}")
    if adapters:
        parts.append(f"adapters {', '.join(adapters)}")
    sentence = f"{engine.url}  {', '.join(parts)}; {about_events}"
    if not sockets:
        sentence += "; until then its cached blocks are estimated from bookings"
    if facts.block_size is None:
        sentence += "; its metrics do not name its block size, so it is not chosen"
    return Attachment(registration, sentence, is_up=True)


def _unreachable(seen: ObservedServer) -> str:
    """Return why an engine's server gave no list of models."""
    if seen.status in (401, 403):
        return (
            f"{seen.status}: it needs a key (worker_token_file, for engines of the setting workers)"
        )
    if seen.status is not None and 300 <= seen.status < 400:
        return f"redirects to another address, which is not followed ({seen.status})"
    if seen.status == 503:
        return "is not ready (503); retrying each second"
    if seen.status is not None:
        return f"answers, but is no engine (GET /v1/models: {seen.status})"
    return f"does not answer ({seen.problem}); retrying each second"


def _kind(seen: ObservedServer) -> str:
    name = _NAMES.get(seen.engine) or seen.owner or "unknown server"
    return name if seen.version is None else f"{name} {seen.version}"


def _sizes(seen: ObservedServer, rank_count: int) -> str:
    ranks = "1 rank" if rank_count == 1 else f"{rank_count} ranks"
    facts = seen.facts
    if facts.total_kv_blocks is None or facts.block_size is None:
        return ranks
    return f"{ranks} of {facts.total_kv_blocks} blocks of {facts.block_size} tokens"


def _sockets(
    engine: EngineUrl, seen: ObservedServer, *, follows_others: bool
) -> tuple[dict[int, RankSockets], str]:
    """Return the sockets to connect to, and a clause about events."""
    if engine.events is not None:
        ranks = range(max(seen.rank_count, 1))
        return {rank: _given(engine, rank) for rank in ranks}, "events at the given address"
    if seen.has_prefix_caching is False:
        return {}, 'prefix caching is off (enable_prefix_caching="False")'
    if seen.sockets is None:
        return {}, _unnamed(engine, seen)
    if not seen.sockets:
        return {}, f"no KV events: start it with {EVENTS_FLAG}"
    found = {}
    for rank, each in seen.sockets.items():
        reached = _reached(engine, each.events, follows_others=follows_others)
        if reached is None:
            return {}, _elsewhere(engine, each.events)
        replay = each.replay and _reached(engine, each.replay, follows_others=follows_others)
        load = each.load and _reached(engine, each.load, follows_others=follows_others)
        found[rank] = RankSockets(reached, replay or None, each.topic, load or None)
    if all(each.replay for each in found.values()):
        return found, "events with replay"
    return found, (
        "events, but no replay: blocks that it has cached before now are unknown, and its trust is "
        "'degraded' until its cache was empty once; add replay_endpoint to --kv-events-config"
    )


def _given(engine: EngineUrl, rank: int) -> RankSockets:
    events, replay = engine.events or "", engine.replay
    return RankSockets(
        rank_endpoint(events, rank, "events"),
        None if replay is None else rank_endpoint(replay, rank, "replay"),
    )


def _unnamed(engine: EngineUrl, seen: ObservedServer) -> str:
    hint = f"name them: {engine.url};events=tcp://{engine.host}:5557"
    if seen.engine == "vllm" and _version(seen.version) < _HAS_SOURCES:
        return f"it does not name its event sockets (vLLM does from 0.31); {hint}"
    return f"it does not name its event sockets; {hint}"


def _version(text: str | None) -> tuple[int, ...]:
    numbers = (text or "").split(".")[:2]
    return tuple(int(each) for each in numbers if each.isdecimal())


def _reached(engine: EngineUrl, address: str, *, follows_others: bool) -> str | None:
    """Return the address to connect to; None if it is not to be reached, or not followed."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname or "*", parts.port
    except ValueError:
        return None
    if parts.scheme != "tcp" or not port:
        return None
    at = f"[{engine.host}]" if ":" in engine.host else engine.host
    if host in WILDCARDS:
        return f"tcp://{at}:{port}"
    is_same = host == engine.host or (host in _LOOPBACK and engine.host in _LOOPBACK)
    return address if is_same or follows_others else None


def _elsewhere(engine: EngineUrl, address: str) -> str:
    if address.startswith(("ipc://", "inproc://")):
        return f"its events at {address} can be read on its own machine only"
    return (
        f"it names {address[:200]!r}, which is not at {engine.host}: it connects there itself "
        f"(then use an address with *), or set workers_on_other_hosts"
    )
