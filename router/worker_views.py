"""Workers as they stand, in the shape that callers read. Mutates nothing."""

from collections.abc import Callable
from typing import Any, TypeAlias

from msgspec import Struct, structs

from router.core import RouterCore
from router.fleet import Worker
from router.protocol.dumps import (
    TIER_NAMES,
    TierName,
)
from router.protocol.loads import LoadGauges
from router.protocol.replies import (
    Trust,
)
from router.protocol.values import HeldState, Rank
from router.protocol.workers import WorkerRegistration
from router.registrations import RegisteredWorker
from router.sequence.rank_table import BUSY

_SHARED_FIELDS = (
    "endpoint",
    "block_size",
    "is_eagle",
    "data_parallel_start_rank",
    "data_parallel_size",
    "max_num_batched_tokens",
    "total_kv_blocks",
)
"""What announced workers say of themselves, and callers may say of those they register."""


class TierView(Struct, frozen=True):
    """What a rank holds in one tier.

    `digest`: XOR of a mix of the hashes, in hexadecimal, for its agent shows the same. `holes`:
    held here or in a faster tier, while their parents are not; as the rank said last.
    """

    blocks: int
    digest: str
    holes: int


class EngineView(Struct, frozen=True):
    """How well this process hears the engine of a rank itself.

    `condition`: connecting, replaying, following, or blind (connected, but nothing is replayed);
    `problem`: what last went wrong; `silent_s`: since its last message, null if there was none.
    """

    events: str
    replay: str | None
    condition: str
    problem: str | None
    silent_s: float | None


EngineOf: TypeAlias = Callable[[Rank], EngineView | None]


class RankView(Struct, frozen=True):
    """One rank of a worker. `is_busy`: it was above a threshold, as of the last decision; `engine`:
    null where its events come over the bus.
    """

    dp_rank: int
    trust: Trust
    held_blocks: int
    tiers: dict[TierName, TierView]
    active_requests: int
    active_prefill_tokens: int
    active_decode_blocks: int
    is_busy: bool
    reported: LoadGauges | None
    engine: EngineView | None = None


class WorkerView(Struct, frozen=True, kw_only=True):
    """One worker, as it announced itself or was registered, and as it stands.

    Null: nobody said it, or it is not known yet. What is only of registered workers comes last,
    before the labels that requests may ask for.
    """

    worker_id: int
    name: str
    model_name: str
    routing_group: str
    lifecycle: str
    endpoint: str | None
    block_size: int | None
    is_eagle: bool | None
    data_parallel_start_rank: int | None
    data_parallel_size: int | None
    max_num_batched_tokens: int | None
    total_kv_blocks: int | None
    role: str
    incarnation: int | None
    last_heard_s: float | None
    not_schedulable_reasons: list[str]
    ranks: list[RankView]
    kv_events_endpoint: str | None = None
    kv_events_endpoints: dict[int, str] = {}
    replay_endpoint: str | None = None
    replay_endpoints: dict[int, str] = {}
    load_endpoints: dict[int, str] = {}
    topic: str | None = None
    engine: str | None = None
    report_mode: str | None = None
    stable_routing_id: str | None = None
    taints: list[str] = []
    topology_domains: dict[str, str] = {}
    kv_transfer_domain: str | None = None
    kv_transfer_enforcement: str | None = None
    kv_transfer_preferred_weight: float | None = None
    lora_names: list[str] | None = None
    max_gpu_lora_count: int | None = None


def no_engine(_: Rank) -> EngineView | None:
    """For a core that hears no engine itself."""
    return None


def workers(core: RouterCore, now_s: float, engine_of: EngineOf = no_engine) -> list[WorkerView]:
    """Every worker that could be chosen, by id."""
    return [worker_view(core, worker, now_s, engine_of) for worker in core.fleet]


def worker_view(
    core: RouterCore, worker: Worker, now_s: float, engine_of: EngineOf = no_engine
) -> WorkerView:
    """One worker."""
    announcement = worker.announcement
    state, reasons = lifecycle(core, worker)
    view = WorkerView(
        worker_id=announcement.worker_id,
        name=announcement.name,
        model_name=announcement.model_name,
        routing_group=announcement.routing_group,
        lifecycle=state,
        endpoint=announcement.endpoint,
        block_size=announcement.identity.block_size,
        is_eagle=announcement.identity.eagle,
        data_parallel_start_rank=announcement.data_parallel_start_rank,
        data_parallel_size=announcement.data_parallel_size,
        max_num_batched_tokens=announcement.max_num_batched_tokens,
        total_kv_blocks=announcement.total_kv_blocks,
        role=announcement.role,
        incarnation=announcement.incarnation,
        last_heard_s=round(now_s - worker.heard_s, 3),
        not_schedulable_reasons=reasons,
        ranks=[_rank_view(core, worker, rank, now_s, engine_of) for rank in announcement.ranks],
        **structs.asdict(announcement.labels),
    )
    if not isinstance(announcement, RegisteredWorker):
        return view
    return structs.replace(view, **_registered_fields(announcement.registration))


def lifecycle(core: RouterCore, worker: Worker) -> tuple[str, list[str]]:
    """Where a worker stands, and what keeps new requests from it."""
    wanted = core.fleet.lifecycle(worker.announcement.worker_id)
    reasons = [] if wanted == "schedulable" else [f"{wanted} by an operator"]
    if worker.is_expected:
        reasons.append("announced, but not heard from yet")
    if worker.problem is not None:
        reasons.append(worker.problem)
    busy = any(core.tracker.active(r).active_requests for r in worker.announcement.ranks)
    if wanted == "draining" and not busy:
        return "drained", reasons
    if wanted == "schedulable" and worker.problem is not None:
        return "unschedulable", reasons
    return ("incomplete" if worker.is_expected else wanted), reasons


def incomplete_view(registration: WorkerRegistration, lacking: list[str]) -> WorkerView:
    """A registered worker that nobody can be sent to, for want of something."""
    return WorkerView(
        worker_id=registration.worker_id,
        name=f"worker {registration.worker_id}",
        model_name=registration.scope.model_name,
        routing_group=registration.scope.routing_group,
        lifecycle="incomplete",
        incarnation=None,
        last_heard_s=None,
        not_schedulable_reasons=lacking,
        ranks=[],
        **_registered_fields(registration),
    )


def _registered_fields(registration: WorkerRegistration) -> dict[str, Any]:
    """As the caller said it; what he did not say is null."""
    said = {**dict.fromkeys(_SHARED_FIELDS), **registration.said}
    return {**said, "role": registration.role or "aggregated"}


def _tier_views(held: HeldState) -> dict[TierName, TierView]:
    rows = zip(held.counts, held.digests, held.holes, strict=True)
    return {
        name: TierView(blocks, f"{digest:016x}", holes)
        for name, (blocks, digest, holes) in zip(TIER_NAMES, rows, strict=True)
    }


def _rank_view(
    core: RouterCore, worker: Worker, rank: Rank, now_s: float, engine_of: EngineOf
) -> RankView:
    active = core.tracker.active(rank)
    report = worker.reports.get(rank)
    return RankView(
        dp_rank=rank.dp_rank,
        trust=core.trust(rank, now_s),
        held_blocks=core.index.held_blocks(rank),
        tiers=_tier_views(core.index.held_state(rank)),
        active_requests=active.active_requests,
        active_prefill_tokens=active.active_prefill_tokens,
        active_decode_blocks=active.active_blocks,
        is_busy=bool(core.ranks.row(rank)[BUSY]),
        reported=None if report is None else report.gauges,
        engine=engine_of(rank),
    )
