"""All sentences about attached engines: pure functions of what was seen of them."""

from collections.abc import Collection, Mapping, Sequence

from router.discovery.attach.engine_client import NOTHING_LISTENS
from router.discovery.attach.engine_server import ObservedServer
from router.discovery.attach.engine_url import EngineUrl
from router.discovery.attach.event_sockets import RankSockets
from router.discovery.attach.life import Return
from router.discovery.attach.versions import ENGINE_NAMES, NAMES_SOCKETS, version_of
from router.protocol.workers import WorkerRegistration
from router.publisher.engine_metrics.dialects import EngineKind

_VLLM_EVENTS = (
    """restart it with --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","""
    """"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}'"""
)
_EVENTS_FLAGS: Mapping[EngineKind | None, str] = {
    "vllm": _VLLM_EVENTS,
    "sglang": (
        """restart it with --kv-events-config '{"publisher":"zmq","endpoint":"tcp://*:5557","""
        """"replay_endpoint":"tcp://*:6557"}' --load-publish-endpoint auto"""
    ),
}
_SERVERS = {"lmdeploy": "LMDeploy", "llamacpp": "llama.cpp"}
"""Servers without KV events, by the owner of their models."""

RETRYING = "; retrying each second"
GIVEN_EVENTS = "events at the given address"
ESTIMATED = "until then its cached blocks are estimated from bookings"
DRAFTS = (
    "it drafts tokens, for which EAGLE and MTP drop a block of each hit: overlaps may be a block "
    "too high; name the groups with ;eagle_groups=0, or ;eagle_groups=none"
)
CACHING_OFF = 'prefix caching is off (enable_prefix_caching="False")'
SHORT = 200
"""Limit of characters of an engine's own words."""


def kind(seen: ObservedServer) -> str:
    """Return the name of an engine and its version."""
    name = ENGINE_NAMES.get(seen.engine) or _SERVERS.get(seen.owner) or seen.owner[:SHORT]
    name = name or "unknown server"
    return name if seen.version is None else f"{name} {seen.version[:SHORT]}"


def description(seen: ObservedServer, registration: WorkerRegistration) -> str:
    """Return the engine, its model and its sizes."""
    model = registration.model_name if seen.models else "no model"
    if not seen.generates:
        return f"{kind(seen)}, embeddings and scores of '{model}': passed on by load"
    parts = [kind(seen), model, _sizes(registration)]
    if registration.role is not None:
        parts.append(f"role {registration.role}")
    if seen.aliases:
        parts.append(f"also named {', '.join(seen.aliases)}")
    if registration.lora_names:
        parts.append(f"adapters {', '.join(registration.lora_names)}")
    return ", ".join(parts)


def _sizes(registration: WorkerRegistration) -> str:
    ranks = _count(registration.data_parallel_size or 1, "rank")
    if not registration.total_kv_blocks or not registration.block_size:
        return ranks
    blocks = f"{registration.total_kv_blocks} blocks of {registration.block_size} tokens"
    return f"{ranks} of {blocks}"


def unreachable(seen: ObservedServer, *, was_up: bool = False) -> str:
    """Return why an engine's server gave no list of models."""
    if was_up and seen.status is None:
        return f"gone: {seen.problem}{RETRYING}"
    if seen.problem == NOTHING_LISTENS:
        return f"not up yet: {NOTHING_LISTENS}{RETRYING}"
    if seen.status in (401, 403):
        open_routes = "/v1" if seen.engine != "sglang" else "everything but /health and /metrics"
        return f"{seen.status}: needs a key for {open_routes} ({KEY_SETTING})"
    if seen.status is None:
        return f"does not answer: {seen.problem}{RETRYING}"
    if 300 <= seen.status < 400:
        return f"redirects to another address, which is not followed ({seen.status})"
    if seen.status == 503:
        return f"is not ready (503){RETRYING}"
    reply = f"{seen.status}, {seen.media_type}" if seen.status == 200 else str(seen.status)
    software = f", server: {seen.software[:SHORT]}" if seen.software else ""
    return f"answers, but is no engine (GET /v1/models: {reply}{software})"


KEY_SETTING = "worker_token_file, for engines of the setting workers"


def needs_key() -> str:
    """Return the clause about an engine whose models cannot be listed."""
    return f"401: needs a key for /v1 ({KEY_SETTING}); events and metrics are open and followed"


def no_events(engine: EngineKind | None) -> str:
    """Return the clause about an engine that publishes nothing, with the flag that changes it."""
    flag = _EVENTS_FLAGS.get(engine)
    return f"no KV events: {flag}" if flag else "no KV events"


def with_replay(sockets: Mapping[int, RankSockets]) -> str:
    """Return the clause about the sockets that an engine names."""
    load = ", load socket" if any(each.load for each in sockets.values()) else ""
    if all(each.replay for each in sockets.values()):
        return f"events with replay{load}"
    return (
        f"events, but no replay{load}: blocks that it has cached before now are unknown, and its "
        "trust is 'degraded' until its cache was empty once; add replay_endpoint to "
        "--kv-events-config"
    )


def unnamed_events(engine: EngineUrl, seen: ObservedServer, tried: Sequence[int]) -> str:
    """Return the clause about sockets that an engine does not name."""
    hint = f"name them: {engine.url};events=tcp://{engine.bracketed_host}:5557"
    if seen.engine is None:
        return "no KV events are known of it: placed by sessions and load"
    if seen.engine == "trtllm":
        return f"it does not name its event sockets; {hint}"
    version = version_of(seen.version)
    since = ""
    if seen.engine == "vllm" and (version is None or version < NAMES_SOCKETS):
        since = " (vLLM does from 0.31)"
    ports = f", and {' and '.join(f':{port}' for port in tried)} are not proved" if tried else ""
    return f"it does not name its event sockets{since}{ports}; {hint}"


def events_elsewhere(engine: EngineUrl, address: str) -> str:
    """Return the clause about sockets that are not on the engine's host."""
    address = address[:SHORT]
    if address.startswith(("ipc://", "inproc://")):
        return (
            f"its events at {address} can be read on its own machine only: if that is this one, "
            f"name them: {engine.url};events={address}"
        )
    if address.startswith(("tcp://127.", "tcp://localhost:", "tcp://[::1]")):
        return f"its events at {address} are open on its own machine only: use an address with *"
    return (
        f"it names {address!r}, which is not at {engine.host}: it connects there itself "
        f"(then use an address with *), or set workers_on_other_hosts"
    )


def silent(dp_rank: int, address: str, seconds: float) -> str:
    """Return the clause about a rank of which a request caused no event."""
    return (
        f"rank {dp_rank}: no event within {seconds:g} s of a request sent to it, at {address}: "
        "is it the socket of another engine?"
    )


def unconnected(dp_rank: int, address: str, problem: str | None, ports: str) -> str:
    """Return the clause about a rank whose socket cannot be connected to."""
    reason = problem or f"no connection to {address}"
    firewall = f": does a firewall let {ports} through?"
    return f"rank {dp_rank}: {reason}{'' if NOTHING_LISTENS in reason else firewall}"


def ports_of(addresses: Collection[str]) -> str:
    """Return the ports of these addresses: 'port 5557', or 'ports 5557–5558'."""
    ports = sorted(int(port) for each in addresses if (port := each.rpartition(":")[2]).isdecimal())
    if not ports:
        return "its connections"
    first, last = ports[0], ports[-1]
    return f"port {first}" if first == last else f"ports {first}–{last}"


def swapped(dp_rank: int, other: int) -> str:
    """Return the clause about a request to one rank that another rank's socket published."""
    return f"rank {dp_rank}: its events come from the socket of rank {other}"


def unproved(dp_rank: int, problem: str) -> str:
    """Return the clause about a request that the engine did not serve."""
    return f"rank {dp_rank} is not proved: {problem[:SHORT]}"


def proved(ranks: int) -> str:
    """Return the clause about sockets that published the requests sent to their ranks."""
    return "proved by a request" if ranks == 1 else "proved by a request to each rank"


UNSALTED = "its events do not contain the cache_salt of requests: send none"


def beside(registration: WorkerRegistration, first: WorkerRegistration, url: str) -> str | None:
    """Return how an engine differs from the first one; None if it does not."""
    if registration.model_name != first.model_name:
        model, other = registration.model_name, first.model_name
        return f"serves '{model}', not '{other}' as {url} does: a pool of its own"
    mine, other_size = registration.block_size, first.block_size
    if mine and other_size and mine != other_size:
        return f"blocks of {mine} tokens, those of {url} {other_size}: each matched in its own size"
    return None


def duplicate(url: str, of: str, evidence: str) -> str:
    """Return the sentence about a second URL of one engine."""
    return f"{url} is {of} ({evidence}): counted once"


SEVERAL_ENGINES = "its counters jump between looks: a load balancer? Name the engines themselves"


def returned(back: Return, before: str | None, now: str | None) -> str:
    """Return the clause about an engine that answers again. `before`, `now`: its fingerprints."""
    gone = f"gone {back.gone_s:.1f} s; " if back.gone_s else ""
    if not back.is_new:
        return f"{gone}back, the same process"
    text = f"{gone}back as a new process"
    if before is not None and now is not None and before != now:
        return f"{text} with other flags (fingerprint {before} → {now}): rates learned anew"
    same = " (same system_fingerprint)" if before is not None and before == now else ""
    return f"{text}: its cache is taken as empty, rates kept{same}"


def not_ready(ready: int, named: int) -> str:
    """Return the clause for the terminal while no worker can be chosen; empty if one can."""
    if ready or not named:
        return ""
    return f"; {ready} of {_count(named, 'worker')} ready, /ready says 503 until one is"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
