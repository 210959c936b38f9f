"""Rank table columns that depend neither on reservations nor on load reports."""

from collections.abc import Iterable

from router.core.fleet import Fleet
from router.indexer.predictions import Predictions
from router.indexer.trusted_index import TrustedIndex
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.replies import Trust, TrustState
from router.protocol.values import Rank
from router.scheduler.settings import TrustWeights
from router.sequence.rank_table import (
    BLOCK_SIZE,
    CAPACITY_BLOCKS,
    DECODE_SIDE,
    EAGLE,
    HELD_BLOCKS,
    HYBRID,
    MAX_BATCHED_TOKENS,
    TRUST_WEIGHT,
    USED_BLOCKS,
    RankTable,
)

_EXACT = TrustState.EXACT  # a lookup of an enum member costs 35 ns

_CLAIMS = (TrustState.EXACT, TrustState.LAGGING, TrustState.DEGRADED)

NOTED_RANKS = 256
"""Ranks updated at a time; takes a millisecond."""


class RankStatus:
    """A writer of the table's columns of worker attributes and index state."""

    __slots__ = ("_fleet", "_index", "_predictions", "_table", "_to_note", "_weights")

    def __init__(
        self,
        table: RankTable,
        fleet: Fleet,
        index: TrustedIndex,
        predictions: Predictions,
        weights: TrustWeights,
    ) -> None:
        self._table = table
        self._fleet = fleet
        self._index = index
        self._predictions = predictions
        self._weights = weights
        self._to_note: list[Rank] = []

    def note_worker(self, rank: Rank, announcement: WorkerAnnouncement) -> None:
        """Write the announced attributes of a rank, which may be new."""
        self._table.add(rank)
        row, identity = self._table.row(rank), announcement.identity
        row[BLOCK_SIZE], row[EAGLE] = identity.block_size, identity.eagle
        row[CAPACITY_BLOCKS] = announcement.total_kv_blocks
        row[MAX_BATCHED_TOKENS] = announcement.max_num_batched_tokens
        row[DECODE_SIDE] = announcement.role == "decode"

    def note(self, rank: Rank, now_s: float, *, is_trusted: bool = False) -> None:
        """Write the index state of a rank; `is_trusted`: its trust and layout are unchanged.

        Unannounced ranks are ignored.
        """
        if rank not in self._table:
            return
        row = self._table.row(rank)
        row[HELD_BLOCKS] = self.held_blocks(rank)
        row[USED_BLOCKS] = self._fleet.used_blocks(rank, now_s)
        if not is_trusted:
            row[TRUST_WEIGHT] = self._weights.weight(self.trust(rank, now_s).state)
            row[HYBRID] = not self._index.keeps_prompts(rank)

    def reweigh(self, weights: TrustWeights, now_s: float) -> None:
        """Apply other weights of trust to all ranks. O(ranks)."""
        self._weights = weights
        for rank in list(self._table):
            self.note(rank, now_s)

    def held_blocks(self, rank: Rank) -> int:
        """Return the number of blocks the rank holds, reported or estimated. O(1).

        An engine without events evicts without a word: its estimate ends at its capacity.
        """
        estimated = self._predictions.held_blocks(rank)
        if estimated and rank in self._table:
            capacity = int(self._table.row(rank)[CAPACITY_BLOCKS])
            estimated = min(estimated, capacity) if capacity else estimated
        return self._index.held_blocks(rank) + estimated

    def note_some(self, now_s: float) -> None:
        """Update some ranks, in rotation, because trust also changes with time."""
        if not self._to_note:
            self._to_note = list(self._table)
        for _ in range(min(NOTED_RANKS, len(self._to_note))):
            self.note(self._to_note.pop(), now_s)

    def trusts(self, ranks: Iterable[Rank], now_s: float) -> list[Trust]:
        """Return the trust in the overlaps of each of these ranks."""
        trust = self.trust
        return [trust(rank, now_s) for rank in ranks]

    def trust(self, rank: Rank, now_s: float) -> Trust:
        """Return the trust in the overlaps of a rank."""
        trust, fleet = self._index.trust(rank, now_s), self._fleet
        worker = fleet.get(rank.worker_id)
        if worker is None:
            return trust
        if worker.is_unreachable:
            return Trust(TrustState.UNREACHABLE, trust.event_id, trust.age_s, worker.problem)
        if worker.caution is not None:
            trust = _cautious(trust, worker.caution)
        if not fleet.is_connected:
            if trust.state is not _EXACT or worker.announcement.source(rank) is not None:
                return trust
            return Trust(TrustState.LAGGING, trust.event_id, trust.age_s, "event bus disconnected")
        silence_s = fleet.silence_s(worker, now_s)
        if silence_s is None:
            return trust
        reason = f"agent silent for {silence_s:.1f} s"
        return Trust(TrustState.BLIND, trust.event_id, trust.age_s, reason)


def _cautious(trust: Trust, caution: str) -> Trust:
    """Return trust that is `degraded` at best, with the reason."""
    if trust.state not in _CLAIMS:
        return trust
    reason = f"{trust.reason}; {caution}" if trust.state is TrustState.DEGRADED else caution
    return Trust(TrustState.DEGRADED, trust.event_id, trust.age_s, reason)
