"""A decision, and every term it was made from, in the shape that callers read."""

from collections.abc import Iterable
from math import isnan

from msgspec import Struct
from msgspec.structs import asdict, replace

from router.block_sources import block_source
from router.core import RouterCore
from router.indexer.base import NO_OVERLAP, OverlapScores
from router.placement import Explained, Placement
from router.plain import PlainPlacement
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.replies import (
    Candidate,
    Decision,
    ExplainedCandidate,
    Explanation,
    LearnedRates,
    OverlapTokens,
    PredictedSeconds,
)
from router.protocol.requests import SelectRequest
from router.scheduler._predictive_kernel import PREDICTED, PREFILL_OWN_S, QUEUE_S
from router.scheduler.terms import (
    OVERLAP_DEVICE,
    OVERLAP_DISK,
    OVERLAP_HOST,
    OVERLAP_REMOTE,
    FloatArray,
    Terms,
    potential_decode_blocks,
)
from router.sequence.footprint import reusable_blocks
from router.sequence.rank_table import (
    BASE_S,
    FOREIGN_REQUESTS,
    KV_S,
    RELATIVE_ERROR,
    REQUESTS,
    TRUST_WEIGHT,
)


class Booking(Struct, frozen=True):
    """What a decision says of how it is booked; nothing where it is not."""

    selection_id: str | None = None
    sequence_hashes: list[int] | None = None
    track_prefill_tokens: bool | None = None


NOT_BOOKED = Booking()


def explain(
    core: RouterCore,
    request: SelectRequest,
    placement: Placement,
    now_s: float,
    booking: Booking = NOT_BOOKED,
) -> Decision:
    """A placement as callers see it; with all that it was made from where they ask for it."""
    decision = explain_plain(core, request.request_id, _plain(placement), now_s)
    if booking is not NOT_BOOKED:
        decision = replace(
            decision,
            selection_id=booking.selection_id,
            sequence_hashes=booking.sequence_hashes,
            track_prefill_tokens=booking.track_prefill_tokens,
        )
    if not request.explain:
        return decision
    why = core.explain(request, placement)
    every = range(len(placement.choice.table))
    return replace(
        decision,
        candidates=explained_candidates(core, placement, why, every, now_s),
        explanation=Explanation(why.settings, why.removed),
    )


def explain_plain(
    core: RouterCore,
    request_id: str | None,
    placement: PlainPlacement,
    now_s: float,
) -> Decision:
    """The same where nobody asks what it was made from, nor books it."""
    worker, rank, row = placement.worker, placement.rank, placement.row
    block_size, isl_tokens = worker.identity.block_size, placement.isl_tokens
    device_blocks, held_blocks = int(row[OVERLAP_DEVICE]), int(row[OVERLAP_REMOTE])
    held_tokens = held_blocks * block_size
    device_tokens = {str(rank.dp_rank): device_blocks * block_size}
    if placement.overlaps is not None and worker.rank_count > 1:
        device_tokens = _device_tokens(worker, placement.overlaps)
    # CPython passes up to 15 arguments by name, and makes a dictionary for more: 0.5 µs.
    decision = Decision(
        request_id=request_id,
        model_name=worker.model_name,
        routing_group=worker.routing_group,
        worker_id=worker.worker_id,
        dp_rank=rank.dp_rank,
        endpoint=worker.endpoint,
        block_size=block_size,
        isl_tokens=isl_tokens,
        overlap=OverlapTokens(
            held_tokens,
            device_blocks * block_size,
            int(row[OVERLAP_HOST]) * block_size,
            int(row[OVERLAP_DISK]) * block_size,
            held_tokens,
            device_tokens,
        ),
        overlap_blocks=device_blocks,
        predicted_cached_blocks=reusable_blocks(
            isl_tokens, block_size, held_blocks, eagle=worker.identity.eagle
        ),
        effective_prefill_tokens=max(isl_tokens - device_blocks * block_size, 0),
        potential_decode_blocks=potential_decode_blocks(row),
        policy=placement.policy,
        trust=core.trust(rank, now_s),
    )
    if placement.overlaps is None or rank.dp_rank not in worker.block_addresses:
        return decision
    return replace(decision, source=block_source(core, placement.overlaps, held_blocks, now_s))


def _plain(placement: Placement) -> PlainPlacement:
    choice, isl_tokens = placement.choice, placement.prompt.isl_tokens
    rank, row = choice.table.ranks[choice.index], choice.table.values[choice.index].tolist()
    worker, overlaps = placement.worker, placement.overlaps
    return PlainPlacement(worker, rank, row, isl_tokens, choice.policy, overlaps)


def _device_tokens(worker: WorkerAnnouncement, overlaps: OverlapScores) -> dict[str, int]:
    """Tokens on the device of each rank of a worker."""
    block_size = worker.identity.block_size
    found = ((rank, overlaps.get(rank, NO_OVERLAP)) for rank in worker.ranks)
    return {str(rank.dp_rank): its.device * block_size for rank, its in found}


def explained_candidates(
    core: RouterCore, placement: Placement, why: Explained, which: Iterable[int], now_s: float
) -> list[ExplainedCandidate]:
    """Some of the candidates with all their terms."""
    table, costs = placement.choice.table, placement.choice.costs
    chances = why.reasons.chances
    return [
        _explained(
            candidate(core, table.terms(i), float(costs[i]), now_s),
            table.values[i],
            why.reasons.of(i),
            None if isnan(chances[i]) else float(chances[i]),
            why.predicted_s[i].tolist(),
        )
        for i in which
    ]


def _explained(
    plain: Candidate,
    row: FloatArray,
    parts: dict[str, float],
    chance: float | None,
    predicted_s: list[float],
) -> ExplainedCandidate:
    device, host, disk, remote = row[OVERLAP_DEVICE : OVERLAP_REMOTE + 1].tolist()
    return ExplainedCandidate(
        **asdict(plain),
        parts=parts,
        chance=chance,
        device_blocks=int(device),
        host_pinned_blocks=int(host),
        disk_blocks=int(disk),
        remote_blocks=int(remote),
        trust_weight=float(row[TRUST_WEIGHT]),
        active_requests=int(row[REQUESTS] + row[FOREIGN_REQUESTS]),
        predicted=_predicted(row, predicted_s),
    )


def _predicted(row: FloatArray, predicted_s: list[float]) -> PredictedSeconds:
    return PredictedSeconds(
        **dict(zip(PREDICTED, predicted_s, strict=False)),
        time_to_first_token_s=sum(predicted_s[QUEUE_S : PREFILL_OWN_S + 1]),
        relative_error=float(row[RELATIVE_ERROR]),
        rates=LearnedRates(*row[BASE_S : KV_S + 1].tolist()),
    )


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
