"""The load of every rank, and its cached prefix of a prompt, in the shapes that callers read.
Mutates nothing.
"""

from router.core import RouterCore
from router.indexer.base import NO_OVERLAP, Overlap
from router.protocol.replies import (
    OverlapScoresReply,
    PotentialLoad,
    RankOverlap,
    ScopeLoads,
    Trust,
)
from router.protocol.requests import PromptRequest
from router.protocol.values import Rank, Scope
from router.sequence.prompt import HashedPrompt, Prompt


def loads(core: RouterCore) -> list[ScopeLoads]:
    """The booked load of every rank, by scope."""
    by_scope: dict[Scope, list[PotentialLoad]] = {}
    for worker in core.fleet:
        announcement = worker.announcement
        here = by_scope.setdefault(announcement.scope, [])
        for rank in announcement.ranks:
            active = core.tracker.active(rank)
            here.append(_load(core, rank, active.active_prefill_tokens, active.active_blocks))
    return [
        ScopeLoads(scope.model_name, scope.routing_group, here, *core.waiting.usage(scope))
        for scope, here in sorted(by_scope.items())
    ]


def potential_loads(
    core: RouterCore, request: PromptRequest, prompt: Prompt, now_s: float
) -> list[PotentialLoad]:
    """The load of every schedulable rank of a scope, were this prompt placed there."""
    table = core.weigh(request, prompt, now_s)
    return [
        _load(core, t.rank, t.potential_prefill_tokens, t.potential_decode_blocks)
        for t in map(table.terms, range(len(table)))
    ]


def overlap_scores(
    core: RouterCore, request: PromptRequest, prompt: Prompt, now_s: float
) -> OverlapScoresReply:
    """The cached prefix of every announced rank of a scope."""
    workers = [w.announcement for w in core.fleet if w.announcement.scope == request.scope]
    overlaps = core.match(request.scope, prompt, workers)
    ranks = [
        _rank_overlap(
            rank,
            prompt.hashed(worker.identity),
            overlaps[worker.identity].get(rank, NO_OVERLAP),
            core.trust(rank, now_s),
            is_eagle=worker.identity.eagle,
        )
        for worker in workers
        for rank in worker.ranks
    ]
    if not workers:
        return OverlapScoresReply(0, 0, ranks)
    first = prompt.hashed(workers[0].identity)
    return OverlapScoresReply(first.block_size, len(first.sequence_hashes), ranks)


def _load(core: RouterCore, rank: Rank, prefill_tokens: int, decode_blocks: int) -> PotentialLoad:
    requests = core.tracker.active(rank).active_requests
    return PotentialLoad(rank.worker_id, rank.dp_rank, prefill_tokens, decode_blocks, requests)


def _rank_overlap(
    rank: Rank, prompt: HashedPrompt, overlap: Overlap, trust: Trust, *, is_eagle: bool
) -> RankOverlap:
    return RankOverlap(
        worker_id=rank.worker_id,
        dp_rank=rank.dp_rank,
        block_size=prompt.block_size,
        num_blocks=len(prompt.sequence_hashes),
        predicted_cached_blocks=prompt.cached_blocks(overlap.remote, eagle=is_eagle),
        device_blocks=overlap.device,
        host_pinned_blocks=overlap.host,
        disk_blocks=overlap.disk,
        remote_blocks=overlap.remote,
        host_pinned_extension_blocks=overlap.host - overlap.device,
        disk_extension_blocks=overlap.disk - overlap.host,
        trust=trust,
    )
