"""Ways to attach this engine: to a router directly, or by an agent next to it."""

from shlex import quote

from msgspec import Struct, json

from router.protocol.values import Doubt
from router.protocol.workers import WorkerRegistration
from router.publisher.engine_metrics.dialects import EngineLimits
from router.tools.doctor.observed_engine import ObservedEngine

_ROUTER = "http://localhost:8092"
_SERVER = "http://ENGINE:8000"


class Attachment(Struct, frozen=True):
    """The body of `POST /workers`, and the command line of an agent."""

    worker: WorkerRegistration
    agent: str

    @property
    def curl(self) -> str:
        """The request, as a shell command."""
        body = quote(json.encode(self.worker).decode())
        return f"curl -H 'content-type: application/json' {_ROUTER}/workers -d {body}"


def attachment(seen: ObservedEngine) -> Attachment:
    """Return both from the settings and observations; words in capitals are placeholders."""
    return Attachment(_worker(seen), _agent(seen))


def _worker(seen: ObservedEngine) -> WorkerRegistration:
    config, dp_rank = seen.config, seen.dp_rank
    return WorkerRegistration(
        worker_id=1,
        model_name=seen.model or "MODEL",
        endpoint=config.url or _SERVER,
        block_size=_block_size(seen),
        data_parallel_start_rank=dp_rank,
        data_parallel_size=1,
        kv_events_endpoints={dp_rank: config.zmq},
        replay_endpoints={dp_rank: config.replay} if config.replay else None,
        topic=config.topic or None,
        total_kv_blocks=seen.server.facts.total_kv_blocks if seen.server else None,
        engine=seen.engine,
        is_eagle=True if seen.contents.eagle_events else None,
        report_mode="full" if _is_full(seen) else None,
    )


def _agent(seen: ObservedEngine) -> str:
    """Return the agent's command line, without flags that metrics provide to the agent."""
    config, facts = seen.config, seen.server.facts if seen.server else EngineLimits()
    flags: dict[str, object] = {
        "engine": seen.engine or "vllm",
        "nats-url": "nats://localhost:4222",
        "worker-id": 1,
        "endpoint": config.url or _SERVER,
        "zmq": _of_rank_0(config.zmq, seen.dp_rank),
        "replay": _of_rank_0(config.replay, seen.dp_rank),
        "topic": config.topic,
        "data-parallel-start-rank": seen.dp_rank or "",
    }
    if facts.block_size and facts.total_kv_blocks:
        flags["metrics-url"] = f"{config.url.rstrip('/')}/metrics"
    else:
        flags["model-name"] = seen.model or "MODEL"
        flags["block-size"] = _block_size(seen)
        flags["total-kv-blocks"] = facts.total_kv_blocks or "BLOCKS"
    if _is_full(seen):
        flags["report-mode"] = "full"
    given = [f"--{flag} {quote(str(value))}" for flag, value in flags.items() if value != ""]
    if seen.contents.eagle_events:
        given.append("--eagle")
    return f"kv-worker-agent run {' '.join(given)}"


def _of_rank_0(endpoint: str, dp_rank: int) -> str:
    """Return the endpoint with rank 0's port; the agent adds the rank to it."""
    before, _, port = endpoint.rpartition(":")
    return f"{before}:{int(port) - dp_rank}" if port.isdecimal() else endpoint


def _block_size(seen: ObservedEngine) -> int:
    engine_block_size = seen.server.facts.block_size if seen.server else None
    return seen.block_size or seen.config.block_size or engine_block_size or 16


def _is_full(seen: ObservedEngine) -> bool:
    return seen.trial is not None and seen.trial.doubts(Doubt.COPIES)
