"""Decisions as callers and the decision log read them, with explanations. Read-only.

A decision may name a rank from which the chosen engine could load more of the prompt. This hint
costs nothing to forward and nothing to ignore: the engine decides between loading and computing.
"""

from collections.abc import Iterator, Sequence
from math import isnan
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import force_setattr, replace

from router.core.core import RouterCore
from router.core.placement import Explained, Placement
from router.indexer.base import NO_OVERLAP, Overlap, OverlapScores
from router.indexer.radix_tree.matches import Matches
from router.protocol.catalogue import block_protocols, usable_address, vllm_p2p_address
from router.protocol.hybrid import Layout
from router.protocol.replies import (
    BlockSource,
    Candidate,
    Decision,
    ExplainedCandidate,
    Explanation,
    LearnedRates,
    OverlapTokens,
    PredictedSeconds,
    RemoteKvSource,
    RemovedRanks,
    SharedTier,
    SplitChoice,
)
from router.protocol.requests import SelectRequest
from router.protocol.values import TIERS, Rank, Tier
from router.scheduler.policy._cost_kernel import (
    SHOWN,
    SHOWN_CACHED,
    SHOWN_HELD,
    SHOWN_REQUESTS,
    shown_terms,
)
from router.scheduler.policy._predicted_parts import PREDICTED, PREFILL_OWN_S, QUEUE_S, TPOT_S
from router.scheduler.terms import (
    OVERLAP_DEVICE,
    OVERLAP_DISK,
    OVERLAP_HOST,
    OVERLAP_REMOTE,
    FloatArray,
    Terms,
    potential_decode_blocks,
)
from router.sequence.active.footprint import reusable_blocks
from router.sequence.rank_table import (
    BASE_S,
    KV_S,
    RATE_ERROR,
    TRUST_WEIGHT,
)

LOOKED_AT = 64
"""Ranks considered, of those that hold most of a prompt; beyond them there is no hint."""

_HOST_COLUMN = 1 + Tier.HOST


def block_source(
    core: RouterCore,
    overlaps: OverlapScores,
    held_blocks: int,
    addresses: Sequence[str],
    now_s: float,
) -> BlockSource | None:
    """Return the rank that holds most of a prompt in memory, if more than the chosen rank holds.

    Of equal ranks it prefers the one that holds most on the device, then the one with the fewest
    tokens to compute. `held_blocks`: what the chosen rank holds on any tier. `addresses`: where it
    shares its own; a source speaks a protocol of theirs. O(matches).
    """
    most, protocols = 0, block_protocols(addresses)
    sources: list[tuple[Rank, Overlap, str]] = []
    for rank, overlap in _holding_more(overlaps, held_blocks):
        if overlap.host < most:
            break
        address = usable_address(_offered(core, rank, now_s), addresses, protocols)
        if address is not None:
            most = overlap.host
            sources.append((rank, overlap, address))
    if not sources:
        return None
    rank, overlap, address = max(sources, key=lambda each: (each[1].device, -_work(core, each[0])))
    is_on_device = overlap.device >= overlap.host
    tier: SharedTier = "device" if is_on_device else "host_pinned"
    p2p = vllm_p2p_address(address)
    remote = None if p2p is None else RemoteKvSource(*p2p)
    return BlockSource(rank.worker_id, rank.dp_rank, overlap.host, tier, remote)


def _offered(core: RouterCore, rank: Rank, now_s: float) -> Sequence[str]:
    """Return where a rank shares its blocks; nowhere if it is known to be silent."""
    worker = core.fleet.get(rank.worker_id)
    if worker is None or core.fleet.silence_s(worker, now_s) is not None:
        return ()
    return worker.announcement.block_addresses.get(rank.dp_rank, ())


def _work(core: RouterCore, rank: Rank) -> int:
    return core.tracker.active(rank).active_prefill_tokens


def _holding_more(overlaps: OverlapScores, blocks: int) -> Iterator[tuple[Rank, Overlap]]:
    """Yield ranks that hold more than `blocks` leading blocks in memory, longest prefix first."""
    if isinstance(overlaps, Matches):
        rows = overlaps.array
        rows = rows[rows[:, _HOST_COLUMN] > blocks]
        order = np.argsort(-rows[:, _HOST_COLUMN].astype(np.int64), kind="stable")
        for holder, *ends in rows[order[:LOOKED_AT]].tolist():
            yield overlaps.rank_of[holder], Overlap(*ends)
        return
    found = [each for each in overlaps.items() if each[1].host > blocks]
    yield from sorted(found, key=lambda each: -each[1].host)[:LOOKED_AT]


def explain(
    core: RouterCore,
    request: SelectRequest,
    placement: Placement,
    now_s: float,
    *,
    is_booked: bool = False,
) -> Decision:
    """Return a placement as callers read it, with all its terms if the request asks for them."""
    choice, worker, isl_tokens = placement.choice, placement.worker, placement.prompt.isl_tokens
    rank, row = choice.table.ranks[choice.index], choice.table.values[choice.index].tolist()
    block_size = worker.identity.block_size
    device_blocks, held_blocks = int(row[OVERLAP_DEVICE]), int(row[OVERLAP_REMOTE])
    held_tokens = held_blocks * block_size
    device_tokens = {str(rank.dp_rank): device_blocks * block_size}
    if worker.rank_count > 1:
        device_tokens = _device_tokens(core, placement)
    # CPython passes up to 15 arguments by name, and makes a dictionary for more, which takes 0.5
    # µs. So the fields of a booking are set afterwards.
    decision = Decision(
        request_id=request.request_id,
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
        policy=choice.policy,
        trust=core.trust(rank, now_s),
    )
    if is_booked:
        hashes = placement.prompt.public_hashes.view(np.int64)
        force_setattr(decision, "selection_id", request.request_id)
        force_setattr(decision, "sequence_hashes", hashes)
        force_setattr(decision, "track_prefill_tokens", placement.tracking.prefill_tokens)
    if addresses := worker.block_addresses.get(rank.dp_rank):
        source = block_source(core, placement.overlaps, held_blocks, addresses, now_s)
        force_setattr(decision, "source", source)
    return _with_terms(core, request, placement, decision, now_s) if request.explain else decision


def _with_terms(
    core: RouterCore, request: SelectRequest, placement: Placement, decision: Decision, now_s: float
) -> Decision:
    """Return a decision with the terms of all candidates."""
    why = core.explain(request, placement)
    every = list(range(len(placement.choice.table)))
    return replace(
        decision,
        candidates=explained_candidates(core, placement, why, every, now_s),
        explanation=Explanation(why.settings, why.removed),
    )


def _device_tokens(core: RouterCore, placement: Placement) -> dict[str, int]:
    """Return the tokens on the device of each rank of the chosen worker."""
    worker, found, rank_of = placement.worker, placement.found, placement.rank_of
    block_size, tokens = worker.identity.block_size, {str(r.dp_rank): 0 for r in worker.ranks}
    slots = [slot for rank in worker.ranks if (slot := core.ranks.find(rank)) is not None]
    for slot, blocks in found[np.isin(found[:, 0], slots), :2].tolist():
        if rank_of[slot].worker_id == worker.worker_id:
            tokens[str(rank_of[slot].dp_rank)] = blocks * block_size
    return tokens


def explained_candidates(
    core: RouterCore, placement: Placement, why: Explained, which: Sequence[int], now_s: float
) -> list[ExplainedCandidate]:
    """Return some of the candidates with all their terms."""
    choice, table = placement.choice, placement.choice.table
    ranks, rows = [table.ranks[i] for i in which], table.values[which]
    shown = np.empty((len(ranks), SHOWN), np.int64)
    shown_terms(rows, table.isl_tokens, shown)
    terms, (*rates, error, trust_weight) = shown.T.tolist(), rows[:, _RATES].T.tolist()
    trusts, weigh = core.trusts(ranks, now_s), core.trust_weights.weight
    chances = why.reasons.chances[which].tolist()
    # A step of Python for each candidate would take twice as long.
    return list(
        map(
            ExplainedCandidate,
            [rank.worker_id for rank in ranks],
            [rank.dp_rank for rank in ranks],
            choice.costs[which].tolist(),
            terms[0],
            [blocks * weigh(trust.state) for blocks, trust in zip(terms[0], trusts, strict=True)],
            *terms[SHOWN_CACHED : SHOWN_HELD + 1],
            trusts,
            why.reasons.named(which),
            [None if isnan(chance) else chance for chance in chances],
            *terms[:TIERS],
            trust_weight,
            terms[SHOWN_REQUESTS],
            _predicted(why.predicted_s[which], rates, error),
            _resumptions(core, placement, ranks, rows),
        )
    )


def _resumptions(
    core: RouterCore, placement: Placement, ranks: Sequence[Rank], rows: FloatArray
) -> list[str | None]:
    """Return, of the hybrid ranks, how resumable blocks compare with those of full attention."""
    layouts = [core.index.layout(rank) for rank in ranks]
    if not any(layouts):
        return [None] * len(ranks)
    prompt = placement.prompt
    full = core.match(placement.choice.table.scope, prompt)
    resumed = (rows[:, OVERLAP_DEVICE] * prompt.block_size).astype(np.int64).tolist()
    texts: list[str | None] = []
    for layout, rank, tokens in zip(layouts, ranks, resumed, strict=True):
        full_tokens = full.get(rank, NO_OVERLAP).device * prompt.block_size
        text = (
            None if layout is None else resumption(layout, full_tokens, tokens, prompt.isl_tokens)
        )
        texts.append(text)
    return texts


def resumption(layout: Layout, full_tokens: int, resumable_tokens: int, isl_tokens: int) -> str:
    """Return how much of a prompt can be resumed, and what ends it before full attention does."""
    text = f"full attention {full_tokens} tokens, resumable {resumable_tokens}"
    limit_tokens = max(min(full_tokens, isl_tokens - 1), 0)
    if resumable_tokens > limit_tokens - layout.alignment_tokens:
        return text
    if not layout.classes:
        return f"{text}: its engine drops the last block for EAGLE"
    kinds = " and ".join(dict.fromkeys(each.kind for each in layout.classes))
    ended_by = "the last checkpoint" if resumable_tokens else "no checkpoint"
    return f"{text}: {ended_by} of its {kinds}"


_RATES = [*range(BASE_S, KV_S + 1), RATE_ERROR, TRUST_WEIGHT]


def _predicted(
    predicted_s: FloatArray, rates: Sequence[list[float]], errors: list[float]
) -> Iterator[PredictedSeconds]:
    parts_s = predicted_s[:, : len(PREDICTED)].T.tolist()
    first_s = map(sum, zip(*parts_s[QUEUE_S : PREFILL_OWN_S + 1], strict=True))
    tpot_s = predicted_s[:, TPOT_S].tolist()
    return map(PredictedSeconds, first_s, *parts_s, tpot_s, errors, map(LearnedRates, *rates))


def candidate(core: RouterCore, terms: Terms, cost: float, now_s: float) -> Candidate:
    """Return a candidate's terms as callers read them."""
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


class LoggedDecision(Struct, frozen=True, omit_defaults=True):
    """A decision for the log.

    `at`: seconds since 1970; `candidates`: the number of candidates, of which `shown` has the
    chosen one, first, and the cheapest others. `split`: see `Decision`; of previews alone.
    """

    at: float
    request_id: str | None
    model_name: str
    routing_group: str
    policy: str
    isl_tokens: int
    block_size: int
    worker_id: int
    dp_rank: int
    cost: float
    settings: dict[str, Any]
    candidates: int
    shown: list[ExplainedCandidate]
    removed: list[RemovedRanks]
    split: SplitChoice | None = None


def without_prompt(request: SelectRequest) -> SelectRequest:
    """Return a request without its prompt, which may be long."""
    return replace(request, token_ids=None, sequence_hashes=None, block_mm_infos=None)


def logged_decision(
    core: RouterCore,
    request: SelectRequest,
    placement: Placement,
    candidates: int,
    at: float,
    now_s: float,
) -> LoggedDecision:
    """Explain a placement, with up to `candidates` candidates. O(all candidates)."""
    choice, why = placement.choice, core.explain(request, placement)
    order = [i for i in choice.costs.argsort().tolist() if i != choice.index]
    shown = [choice.index, *order[: candidates - 1]]
    return LoggedDecision(
        at=round(at, 6),
        request_id=request.request_id,
        model_name=request.model_name,
        routing_group=request.routing_group,
        policy=choice.policy,
        isl_tokens=placement.prompt.isl_tokens,
        block_size=placement.prompt.block_size,
        worker_id=placement.rank.worker_id,
        dp_rank=placement.rank.dp_rank,
        cost=float(choice.costs[choice.index]),
        settings=why.settings,
        candidates=len(choice.table),
        shown=explained_candidates(core, placement, why, shown, now_s),
        removed=why.removed,
    )
