"""Views of the load of every rank and of its cached prefix of a prompt. Read-only."""

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import structs

from router.core.core import RouterCore
from router.core.fleet import FleetWorker, ScopeRanks
from router.core.registered_workers import RegisteredWorker
from router.indexer.base import Overlap
from router.protocol.dumps import (
    TIER_NAMES,
    TierName,
)
from router.protocol.replies import (
    OverlapScoresReply,
    PotentialLoad,
    RankOverlap,
    ScopeLoads,
    ServedName,
)
from router.protocol.requests import PotentialLoadsRequest, PromptRequest
from router.protocol.values import HeldState, Rank
from router.protocol.workers import (
    ClassView,
    EngineView,
    LayoutView,
    RankView,
    TierView,
    WorkerRegistration,
    WorkerView,
)
from router.scheduler.policy._cost_kernel import (
    SHOWN,
    SHOWN_DECODE,
    SHOWN_OWN_REQUESTS,
    SHOWN_PREFILL,
    shown_terms,
)
from router.sequence.active.prompt import Prompt
from router.sequence.rank_table import BUSY, DECODE_BLOCKS, PREFILL_TOKENS, REQUESTS


def loads(core: RouterCore) -> list[ScopeLoads]:
    """Return the reserved load of every rank, by scope.

    Scopes without workers are included if their requests wait for one.
    """
    scopes = dict(core.fleet.scopes()) | dict.fromkeys(core.scopes_in_waiting, ScopeRanks())
    return [
        ScopeLoads(
            scope.model_name,
            scope.routing_group,
            _booked(core, here.ranks),
            *core.waiting.usage(scope),
            **_names(core, here.ranks),
        )
        for scope, here in sorted(scopes.items(), key=itemgetter(0))
    ]


def _names(core: RouterCore, ranks: Sequence[Rank]) -> dict[str, Any]:
    """Return the further names of a model, and its longest request, if workers announce any."""
    found: dict[tuple[str, bool], list[int]] = {}
    worker_ids = list(dict.fromkeys(rank.worker_id for rank in ranks))
    lengths: list[int] = []
    for worker_id in worker_ids:
        worker = core.fleet.get(worker_id)
        if worker is None:
            continue
        labels = worker.announcement.labels
        lengths += [] if labels.max_model_len is None else [labels.max_model_len]
        for name in labels.model_aliases:
            found.setdefault((name, False), []).append(worker_id)
        for name in labels.lora_names or ():
            found.setdefault((name, True), []).append(worker_id)
    fields: dict[str, Any] = {"max_model_len": min(lengths)} if lengths else {}
    if found:
        fields["names"] = [ServedName(*name, ids) for name, ids in sorted(found.items())]
    return fields


def potential_loads(
    core: RouterCore, request: PotentialLoadsRequest, prompt: Prompt, now_s: float
) -> list[PotentialLoad]:
    """Return the load of every schedulable rank of a scope if this prompt were placed there."""
    table = core.weigh(request, prompt, now_s)
    shown = np.empty((len(table), SHOWN), np.int64)
    shown_terms(table.values, table.isl_tokens, shown)
    if not core.counts_prompt(request):
        shown[:, SHOWN_PREFILL] = table.column(PREFILL_TOKENS)
    return _loads(table.ranks, shown[:, [SHOWN_PREFILL, SHOWN_DECODE, SHOWN_OWN_REQUESTS]])


def _booked(core: RouterCore, ranks: Sequence[Rank]) -> list[PotentialLoad]:
    rows = core.ranks.values[[core.ranks.slot(rank) for rank in ranks]]
    return _loads(ranks, rows[:, [PREFILL_TOKENS, DECODE_BLOCKS, REQUESTS]].astype(np.int64))


def _loads(ranks: Sequence[Rank], rows: npt.NDArray[np.int64]) -> list[PotentialLoad]:
    """Return the loads of ranks. `rows`: of each, prompt tokens, decode blocks and requests."""
    worker_ids = [rank.worker_id for rank in ranks]
    dp_ranks = [rank.dp_rank for rank in ranks]
    return list(map(PotentialLoad, worker_ids, dp_ranks, *rows.T.tolist()))


def overlap_scores(
    core: RouterCore, request: PromptRequest, prompt: Prompt, now_s: float
) -> OverlapScoresReply:
    """Return the cached prefix of every announced rank of a scope."""
    here = core.fleet.scopes().get(request.scope)
    if here is None:
        return OverlapScoresReply(0, 0, [])
    prompts = [prompt.hashed(identity) for identity in here.identities]
    blocks = [len(each.sequence_hashes) for each in prompts]
    # Most ranks of a large fleet hold nothing: a step of Python for each would take twice as long.
    static, nothing = (here.worker_ids, here.dp_ranks, here.block_sizes), [repeat(0)] * 7
    trusts, num_blocks = core.trusts(here.ranks, now_s), map(blocks.__getitem__, here.kinds)
    shown = list(map(RankOverlap, *static, num_blocks, *nothing, trusts))
    for kind, hashed in enumerate(prompts):
        is_eagle = here.identities[kind].eagle
        found = core.match(request.scope, hashed)
        are_hybrid = any(core.index.layout(rank) is not None for rank in found)
        resumable = core.resumable(request.scope, hashed) if are_hybrid else found
        for rank, overlap in found.items():
            place = here.places.get(rank)
            if place is not None and here.kinds[place] == kind:
                resumed_blocks = resumable.get(rank, overlap).remote
                reused = hashed.cached_blocks(resumed_blocks, eagle=is_eagle)
                is_hybrid = are_hybrid and core.index.layout(rank) is not None
                tokens = resumed_blocks * hashed.block_size if is_hybrid else None
                shown[place] = _holding(shown[place], overlap, reused, tokens)
    return OverlapScoresReply(prompts[0].block_size, blocks[0], shown)


def _holding(
    rank: RankOverlap, overlap: Overlap, reused_blocks: int, resumable_tokens: int | None
) -> RankOverlap:
    device, host, disk, remote = overlap.device, overlap.host, overlap.disk, overlap.remote
    return RankOverlap(
        rank.worker_id,
        rank.dp_rank,
        rank.block_size,
        rank.num_blocks,
        reused_blocks,
        device,
        host,
        disk,
        remote,
        host - device,
        disk - host,
        rank.trust,
        None,
        resumable_tokens,
    )  # with names it takes twice as long


_SHARED_FIELDS = (
    "endpoint",
    "block_size",
    "is_eagle",
    "data_parallel_start_rank",
    "data_parallel_size",
    "max_num_batched_tokens",
    "total_kv_blocks",
)
"""Fields that announced workers report, and that callers may set for workers they register."""


EngineOf: TypeAlias = Callable[[Rank], EngineView | None]


def no_engine(_: Rank) -> EngineView | None:
    """Return None: the core is not attached to engines directly."""
    return None


def workers(core: RouterCore, now_s: float, engine_of: EngineOf = no_engine) -> list[WorkerView]:
    """Return every known worker, by id."""
    return [worker_view(core, worker, now_s, engine_of) for worker in core.fleet]


def worker_view(
    core: RouterCore, worker: FleetWorker, now_s: float, engine_of: EngineOf = no_engine
) -> WorkerView:
    """Return the view of one worker."""
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
        last_heard_s=round(now_s - worker.last_seen_s, 3),
        not_schedulable_reasons=reasons,
        ranks=[_rank_view(core, worker, rank, now_s, engine_of) for rank in worker.ranks],
        block_addresses=announcement.block_addresses,
        **structs.asdict(announcement.labels),
    )
    if not isinstance(announcement, RegisteredWorker):
        return view
    return structs.replace(view, **_registered_fields(announcement.registration))


def lifecycle(core: RouterCore, worker: FleetWorker) -> tuple[str, list[str]]:
    """Return the lifecycle of a worker, and the reasons against scheduling requests on it."""
    wanted = core.fleet.lifecycle(worker.announcement.worker_id)
    reasons = [] if wanted == "schedulable" else [f"{wanted} by an operator"]
    if worker.is_expected:
        reasons.append("announced, but no report received yet")
    if worker.problem is not None:
        reasons.append(worker.problem)
    if wanted == "draining" and not any(core.ranks.row(rank)[REQUESTS] for rank in worker.ranks):
        return "drained", reasons
    if wanted == "schedulable" and worker.problem is not None:
        return "unschedulable", reasons
    return ("incomplete" if worker.is_expected else wanted), reasons


def incomplete_view(registration: WorkerRegistration, lacking: list[str]) -> WorkerView:
    """Return the view of a registered worker that is not schedulable for lack of fields."""
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
    """Return the fields as the caller set them; the others are null."""
    said = {**dict.fromkeys(_SHARED_FIELDS), **registration.given}
    return {**said, "role": registration.role or "aggregated"}


def _tier_views(held: HeldState) -> dict[TierName, TierView]:
    rows = zip(held.counts, held.digests, held.holes, strict=True)
    return {
        name: TierView(blocks, f"{digest:016x}", holes)
        for name, (blocks, digest, holes) in zip(TIER_NAMES, rows, strict=True)
    }


def _rank_view(
    core: RouterCore, worker: FleetWorker, rank: Rank, now_s: float, engine_of: EngineOf
) -> RankView:
    active = core.tracker.active(rank)
    report = worker.reports.get(rank)
    return RankView(
        dp_rank=rank.dp_rank,
        trust=core.trust(rank, now_s),
        held_blocks=core.held_blocks(rank),
        tiers=_tier_views(core.index.held_state(rank)),
        active_requests=active.active_requests,
        active_prefill_tokens=active.active_prefill_tokens,
        active_decode_blocks=active.active_blocks,
        is_busy=bool(core.ranks.row(rank)[BUSY]),
        reported=None if report is None else report.gauges,
        engine=engine_of(rank),
        layout=_layout_view(core, rank),
    )


def _layout_view(core: RouterCore, rank: Rank) -> LayoutView | None:
    layout = core.index.layout(rank)
    if layout is None:
        return None
    return LayoutView(
        layout.alignment_tokens,
        layout.full_block_tokens,
        layout.is_full_eagle,
        layout.problem,
        [
            ClassView(each.kind, each.block_tokens, each.span_tokens, each.is_eagle, blocks)
            for each, blocks in core.index.class_blocks(rank)
        ],
    )
