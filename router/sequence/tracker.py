"""Who booked what, where, until when: the reservations of all ranks."""

from msgspec import Struct
from sortedcontainers import SortedSet

from router.errors import DuplicateReservationError, ReservationNotFoundError
from router.protocol.values import HashArray, Rank
from router.sequence.active import ActiveSequences
from router.sequence.footprint import Footprint
from router.sequence.prompt_trie import PromptTrie, SlotDepths
from router.sequence.rank_table import DECODING_KV_TOKENS, PREFILL_TOKENS, RankTable


class Reservation(Struct, frozen=True):
    """Where a request is booked, and when it expires unless it shows progress."""

    rank: Rank
    expires_s: float


class Tracker:
    """Reservations by id, by rank, and by expiry; and the columns of the table that tell of them.

    Invariants: every reservation is in exactly one rank's sequences and once in the expiry
    order; no rank is kept without reservations; a rank's columns are what its sequences say.
    """

    __slots__ = ("_by_expiry", "_by_id", "_by_rank", "_table", "_trie", "_ttl_s")

    def __init__(self, ttl_s: float, table: RankTable) -> None:
        self._ttl_s = ttl_s
        self._table = table
        self._trie = PromptTrie()
        self._by_id: dict[str, Reservation] = {}
        self._by_rank: dict[Rank, ActiveSequences] = {}
        self._by_expiry: SortedSet = SortedSet()

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def active(self, rank: Rank) -> ActiveSequences:
        """What this rank, which has a slot, is busy with; to read."""
        active = self._by_rank.get(rank)
        return ActiveSequences(self._trie, self._table.slot(rank)) if active is None else active

    def write_depths(self, sequence_hashes: HashArray, depths: SlotDepths) -> None:
        """Leading blocks of a prompt that each slot is busy with, where it is with any."""
        self._trie.write_depths(sequence_hashes, depths)

    def book(self, request_id: str, rank: Rank, footprint: Footprint, now_s: float) -> None:
        """Book a request on a rank that has a slot. Raises DuplicateReservationError.

        O(nodes on its way + log reservations).
        """
        if request_id in self._by_id:
            raise DuplicateReservationError(request_id)
        active = self._by_rank.get(rank)
        if active is None:
            slot = self._table.slot(rank)
            active = self._by_rank[rank] = ActiveSequences(self._trie, slot)
        active.add(request_id, footprint, now_s)
        self._note(rank, active)
        self._schedule(request_id, rank, now_s)

    def prefill_complete(self, request_id: str, now_s: float) -> Rank:
        """Its prompt is computed; idempotent. Raises ReservationNotFoundError."""
        rank = self._find(request_id).rank
        active = self._by_rank[rank]
        active.prefill_complete(request_id, now_s)
        self._note(rank, active)
        self._progress(request_id, now_s)
        return rank

    def add_output_block(self, request_id: str, decay_fraction: float | None, now_s: float) -> Rank:
        """It grew by a block. Raises ReservationNotFoundError."""
        rank = self._find(request_id).rank
        active = self._by_rank[rank]
        active.add_output_block(request_id, decay_fraction)
        self._note(rank, active)
        self._progress(request_id, now_s)
        return rank

    def progress(self, request_id: str, now_s: float) -> Rank:
        """It lives, whatever it does. Raises ReservationNotFoundError."""
        rank = self._find(request_id).rank
        self._progress(request_id, now_s)
        return rank

    def free(self, request_id: str, now_s: float) -> Rank:
        """It ended. O(nodes on its way + log reservations). Raises ReservationNotFoundError."""
        rank = self._find(request_id).rank
        self._forget(request_id, now_s)
        return rank

    def drop_rank(self, rank: Rank) -> list[str]:
        """Free everything booked on a rank; the ids. O(its reservations)."""
        active = self._by_rank.get(rank)
        if active is None:
            return []
        ids = active.request_ids
        for request_id in ids:
            self._forget(request_id, active.head_since_s)
        return ids

    def expire(self, now_s: float) -> list[tuple[str, Rank]]:
        """Free every reservation without progress for the time to live. O(expired · log all)."""
        expired = []
        while self._by_expiry and self._by_expiry[0][0] <= now_s:
            request_id = self._by_expiry[0][1]
            expired.append((request_id, self.free(request_id, now_s)))
        return expired

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(everything)."""
        self._trie.check_invariants()
        expected = {(r.expires_s, request_id) for request_id, r in self._by_id.items()}
        assert set(self._by_expiry) == expected
        for rank, active in self._by_rank.items():
            active.check_invariants()
            here = [i for i, r in self._by_id.items() if r.rank == rank]
            assert active.active_requests == len(here) > 0
            assert all(request_id in active for request_id in here)
        for rank in self._table:
            row = self._table.row(rank)[PREFILL_TOKENS : DECODING_KV_TOKENS + 1]
            assert tuple(row) == _columns(self.active(rank))

    def _find(self, request_id: str) -> Reservation:
        reservation = self._by_id.get(request_id)
        if reservation is None:
            raise ReservationNotFoundError(request_id)
        return reservation

    def _schedule(self, request_id: str, rank: Rank, now_s: float) -> None:
        expires_s = now_s + self._ttl_s
        self._by_id[request_id] = Reservation(rank, expires_s)
        self._by_expiry.add((expires_s, request_id))

    def _progress(self, request_id: str, now_s: float) -> None:
        reservation = self._by_id[request_id]
        self._by_expiry.remove((reservation.expires_s, request_id))
        self._schedule(request_id, reservation.rank, now_s)

    def _forget(self, request_id: str, now_s: float) -> None:
        reservation = self._by_id.pop(request_id)
        self._by_expiry.remove((reservation.expires_s, request_id))
        active = self._by_rank[reservation.rank]
        active.free(request_id, now_s)
        if not active.active_requests:
            del self._by_rank[reservation.rank]
        self._note(reservation.rank, active)

    def _note(self, rank: Rank, active: ActiveSequences) -> None:
        self._table.row(rank)[PREFILL_TOKENS : DECODING_KV_TOKENS + 1] = _columns(active)


def _columns(active: ActiveSequences) -> tuple[float, ...]:
    """In the table's order, PREFILL_TOKENS to DECODING_KV_TOKENS."""
    head = active.head
    return (
        active.active_prefill_tokens,
        active.active_prefill_contexts,
        0 if head is None else head.prefill_tokens,
        0 if head is None else head.prefill_contexts,
        0 if head is None else active.head_since_s,
        active.active_blocks,
        active.active_requests,
        active.decoding_requests,
        active.decoding_kv_tokens,
    )
