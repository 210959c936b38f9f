"""Who booked what, where, until when: the reservations of all ranks."""

from msgspec import Struct
from sortedcontainers import SortedSet

from router.errors import DuplicateReservationError, ReservationNotFoundError
from router.protocol.values import Rank
from router.sequence.active import ActiveSequences
from router.sequence.prompt import HashedPrompt


class Reservation(Struct, frozen=True):
    """Where a request is booked, and when it expires unless it shows progress."""

    rank: Rank
    expires_s: float


class ProjectedLoad(Struct, frozen=True):
    """Load of a rank, with a prompt added to it."""

    prefill_tokens: int
    decode_blocks: int


class Tracker:
    """Reservations by id, by rank, and by expiry.

    Invariants: every reservation is in exactly one rank's sequences and once in the expiry
    order; no rank is kept without reservations.
    """

    __slots__ = ("_by_expiry", "_by_id", "_by_rank", "_idle", "_ttl_s")

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._by_id: dict[str, Reservation] = {}
        self._by_rank: dict[Rank, ActiveSequences] = {}
        self._by_expiry: SortedSet = SortedSet()
        self._idle = ActiveSequences()

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def active(self, rank: Rank) -> ActiveSequences:
        """What this rank is busy with, to read."""
        return self._by_rank.get(rank, self._idle)

    def projected(self, rank: Rank, prompt: HashedPrompt, overlap_blocks: int) -> ProjectedLoad:
        """The rank's load with this prompt on it. O(blocks of the prompt already active there)."""
        active = self.active(rank)
        new_blocks = active.new_blocks(prompt.hash_list, prompt.own_blocks)
        return ProjectedLoad(
            active.active_prefill_tokens + prompt.prefill_tokens(overlap_blocks),
            active.active_blocks + new_blocks,
        )

    def book(
        self, request_id: str, rank: Rank, prompt: HashedPrompt, overlap_blocks: int, now_s: float
    ) -> None:
        """Book a prompt on a rank. O(blocks). Raises DuplicateReservationError."""
        if request_id in self._by_id:
            raise DuplicateReservationError(request_id)
        self._by_rank.setdefault(rank, ActiveSequences()).add(
            request_id,
            prompt.hash_list,
            prompt.own_blocks,
            prompt.prefill_tokens(overlap_blocks),
        )
        self._schedule(request_id, rank, now_s)

    def prefill_complete(self, request_id: str, now_s: float) -> Rank:
        """Its prompt is computed; idempotent. Raises ReservationNotFoundError."""
        rank = self._find(request_id).rank
        self._by_rank[rank].prefill_complete(request_id)
        self._progress(request_id, now_s)
        return rank

    def add_output_block(self, request_id: str, decay_fraction: float | None, now_s: float) -> Rank:
        """It grew by a block. Raises ReservationNotFoundError."""
        rank = self._find(request_id).rank
        self._by_rank[rank].add_output_block(request_id, decay_fraction)
        self._progress(request_id, now_s)
        return rank

    def free(self, request_id: str) -> Rank:
        """It ended. O(blocks + log reservations). Raises ReservationNotFoundError."""
        rank = self._find(request_id).rank
        self._forget(request_id)
        return rank

    def drop_rank(self, rank: Rank) -> list[str]:
        """Free everything booked on a rank; the ids. O(its reservations)."""
        ids = self.active(rank).request_ids
        for request_id in ids:
            self._forget(request_id)
        return ids

    def expire(self, now_s: float) -> list[tuple[str, Rank]]:
        """Free every reservation without progress for the time to live. O(expired · log all)."""
        expired = []
        while self._by_expiry and self._by_expiry[0][0] <= now_s:
            request_id = self._by_expiry[0][1]
            expired.append((request_id, self.free(request_id)))
        return expired

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(everything)."""
        expected = {(r.expires_s, request_id) for request_id, r in self._by_id.items()}
        assert set(self._by_expiry) == expected
        for rank, active in self._by_rank.items():
            active.check_invariants()
            here = [i for i, r in self._by_id.items() if r.rank == rank]
            assert active.active_requests == len(here) > 0
            assert all(request_id in active for request_id in here)
        assert self._idle.active_requests == 0

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

    def _forget(self, request_id: str) -> None:
        reservation = self._by_id.pop(request_id)
        self._by_expiry.remove((reservation.expires_s, request_id))
        active = self._by_rank[reservation.rank]
        active.free(request_id)
        if not active.active_requests:
            del self._by_rank[reservation.rank]
