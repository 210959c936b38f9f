"""Comparison of engines' usage reports with predictions, checked against the index."""

from functools import partial

from router.accuracy.accuracy import AccuracyMonitor
from router.accuracy.observation import Observation, Shown
from router.core.effects import Effect, UsageTold
from router.indexer.base import NO_OVERLAP
from router.indexer.trusted_index import TrustedIndex
from router.protocol.replicas import PromptUsage
from router.protocol.values import Doubt, Rank
from router.sequence.active.footprint import ExpectedUsage, Footprint
from router.sequence.active.tracker import Tracker
from router.sequence.active.usage_prediction import Prediction


class UsageCheck:
    """The comparison, in `closed_loop`."""

    __slots__ = ("_index", "_tracker", "closed_loop")

    def __init__(self, tracker: Tracker, index: TrustedIndex) -> None:
        self._tracker = tracker
        self._index = index
        self.closed_loop = AccuracyMonitor()

    def compare(self, request_id: str, usage: PromptUsage, now_s: float) -> list[Effect]:
        """Compare a prompt's usage report with its prediction; each request counts once."""
        self.closed_loop.settle(now_s)
        taken = self._tracker.take_prediction(request_id)
        if taken is None:
            return []
        rank, prediction = taken
        footprint, is_eagle = prediction.footprint, self._tracker.is_eagle(rank)
        expectation = footprint.expectation
        if expectation is None:
            overlap_blocks = footprint.cached_tokens // footprint.block_size
        else:
            overlap_blocks = expectation.overlap_blocks
            life = self._index.incarnation(rank)
            look = partial(self._look, rank, life, footprint, expectation)
            layout = self._index.layout(rank)
            is_hybrid = layout is not None and not layout.problem
            seen = _observation(rank, prediction, expectation, usage, is_eagle, is_hybrid)
            self.closed_loop.note(seen, look, now_s)
        if not usage.is_cached_told:
            return []
        predicted_tokens = footprint.reusable_tokens(overlap_blocks, eagle=is_eagle)
        return [UsageTold(usage, predicted_tokens)]

    def _look(
        self, rank: Rank, life: int | None, footprint: Footprint, expectation: ExpectedUsage
    ) -> Shown | None:
        """Return the blocks of a prompt that the index shows as reusable on a rank now.

        Returns None if that incarnation is over, if no event of the rank arrived, or if its index
        is known to be wrong, which is repaired or shown as its trust.
        """
        index = self._index
        if life is None or index.incarnation(rank) != life:
            return None
        doubts = index.doubts(rank)
        if index.is_broken(rank) or doubts & ~Doubt.UNREADABLE:
            return None
        prompt = (expectation.found_by, footprint.isl_tokens, footprint.block_size)
        found = index.resumable(expectation.scope, *prompt)
        shown_tokens, full_tokens = found.get(rank, NO_OVERLAP).remote * footprint.block_size, 0
        if index.layout(rank) is not None:
            full = index.find_matches(expectation.scope, expectation.found_by)
            full_tokens = full.get(rank, NO_OVERLAP).device * footprint.block_size
        held_blocks, fresh_at_s = index.held_blocks(rank), index.fresh_at_s(rank)
        is_unreadable = bool(doubts & Doubt.UNREADABLE)
        return Shown(shown_tokens, held_blocks, fresh_at_s, is_unreadable, full_tokens)


def _observation(
    rank: Rank,
    prediction: Prediction,
    expectation: ExpectedUsage,
    usage: PromptUsage,
    is_eagle: bool,
    is_hybrid: bool,
) -> Observation:
    footprint = prediction.footprint
    device_blocks = footprint.cached_tokens // footprint.block_size
    predicted_tokens = footprint.reusable_tokens(expectation.overlap_blocks, eagle=is_eagle)
    is_surplus = usage.cached_tokens > predicted_tokens  # otherwise recent ends do not matter
    busy_blocks = prediction.busy_blocks if is_surplus else prediction.in_flight_blocks
    in_flight_tokens = busy_blocks * footprint.block_size
    if not len(footprint.sequence_hashes):  # sharing of blocks is not tracked
        in_flight_tokens = footprint.isl_tokens
    return Observation(
        rank.worker_id,
        expectation.scope,
        expectation.tenant,
        footprint.block_size,
        footprint.isl_tokens,
        footprint.reusable_tokens(device_blocks, eagle=is_eagle),
        predicted_tokens,
        in_flight_tokens,
        usage.prompt_tokens,
        usage.cached_tokens if usage.is_cached_told else None,
        expectation.is_salted,
        expectation.is_named_by_caller,
        expectation.has_objects,
        is_hybrid,
    )
