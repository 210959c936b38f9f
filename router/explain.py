"""A decision, and every term it was made from, in the shape that callers read."""

from router.core import RouterCore
from router.indexer.base import NO_OVERLAP
from router.placer import Placement
from router.protocol.replies import Candidate, Decision, OverlapTokens
from router.protocol.requests import SelectRequest
from router.scheduler.terms import Terms


def explain(
    core: RouterCore, request: SelectRequest, placement: Placement, now_s: float
) -> Decision:
    """A placement as callers see it; with every candidate's terms where they ask for them."""
    chosen, prompt, worker = placement.choice.chosen, placement.prompt, placement.worker
    return Decision(
        request_id=request.request_id,
        model_name=worker.model_name,
        routing_group=worker.routing_group,
        worker_id=worker.worker_id,
        dp_rank=chosen.rank.dp_rank,
        endpoint=worker.endpoint,
        block_size=worker.identity.block_size,
        isl_tokens=prompt.isl_tokens,
        overlap=_overlap_tokens(placement),
        overlap_blocks=chosen.overlap_blocks,
        predicted_cached_blocks=chosen.predicted_cached_blocks,
        effective_prefill_tokens=prompt.prefill_tokens(chosen.overlap_blocks),
        potential_decode_blocks=chosen.potential_decode_blocks,
        policy=placement.choice.policy,
        trust=core.trust(chosen.rank, now_s),
        candidates=_candidates(core, placement, now_s) if request.explain else None,
    )


def _overlap_tokens(placement: Placement) -> OverlapTokens:
    block_size = placement.prompt.block_size
    overlap = placement.overlaps.get(placement.rank, NO_OVERLAP)
    dp = {
        str(rank.dp_rank): placement.overlaps.get(rank, NO_OVERLAP).device * block_size
        for rank in placement.worker.ranks
    }
    return OverlapTokens(
        longest_matched=overlap.remote * block_size,
        gpu=overlap.device * block_size,
        cpu=overlap.host * block_size,
        disk=overlap.disk * block_size,
        remote=overlap.remote * block_size,
        dp=dp,
    )


def _candidates(core: RouterCore, placement: Placement, now_s: float) -> list[Candidate]:
    table, costs = placement.choice.table, placement.choice.costs.tolist()
    return [candidate(core, table.terms(i), cost, now_s) for i, cost in enumerate(costs)]


def candidate(core: RouterCore, terms: Terms, cost: float, now_s: float) -> Candidate:
    """A candidate's terms as callers see them."""
    trust = core.trust(terms.rank, now_s)
    return Candidate(
        worker_id=terms.rank.worker_id,
        dp_rank=terms.rank.dp_rank,
        cost=cost,
        overlap_blocks=terms.overlap_blocks,
        trusted_overlap_blocks=terms.overlap_blocks * core.trust_weights.weight(trust.state),
        predicted_cached_blocks=terms.predicted_cached_blocks,
        potential_prefill_tokens=terms.potential_prefill_tokens,
        potential_decode_blocks=terms.potential_decode_blocks,
        held_blocks=terms.held_blocks,
        trust=trust,
    )
