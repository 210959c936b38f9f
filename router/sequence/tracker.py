"""Who booked what, where, until when: the reservations of all ranks."""

from collections import OrderedDict
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import astuple

from router.errors import DuplicateReservationError, ReservationNotFoundError
from router.protocol.replicas import SharedReservation
from router.protocol.values import HashArray, Rank, pack_hashes
from router.sequence.active import ActiveSequences, BookingId, ForeignId
from router.sequence.footprint import Footprint
from router.sequence.ledger import Ledger
from router.sequence.prompt_trie import PromptTrie, SlotDepths
from router.sequence.rank_table import DECODING_KV_TOKENS, PREFILL_TOKENS, RankTable


class Reservation(Struct, frozen=True):
    """Where a request is booked, and when it expires unless it shows progress."""

    rank: Rank
    expires_s: float


MAX_SHARED_BLOCKS = 1 << 16
"""Of longer prompts the other routers are told the first so many blocks; the rest counts as blocks
that nobody shares.
"""


class Tracker:
    """Reservations by id, by rank, and by expiry; and the columns of the table that tell of them.

    Those of other routers weigh as ours do, but are theirs: `len` does not count them, and they do
    not expire here. `ledger`, where there is one, notes every change of ours. Time never goes back.

    Invariants: every reservation is in exactly one rank's sequences; ours are in the order in which
    they expire; no rank is kept without reservations; a rank's columns are what its sequences say.
    """

    __slots__ = ("_by_id", "_by_rank", "_foreign", "_table", "_trie", "_ttl_s", "ledger")

    def __init__(self, ttl_s: float, table: RankTable) -> None:
        self._ttl_s = ttl_s
        self._table = table
        self._trie = PromptTrie()
        self._by_id: OrderedDict[str, Reservation] = OrderedDict()
        self._foreign: dict[ForeignId, Rank] = {}
        self._by_rank: dict[Rank, ActiveSequences] = {}
        self.ledger: Ledger | None = None

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: BookingId) -> bool:
        return request_id in (self._by_id if isinstance(request_id, str) else self._foreign)

    def check_new(self, request_id: str) -> None:
        """Raises DuplicateReservationError for an id of ours that is booked."""
        reservation = self._by_id.get(request_id)
        if reservation is not None:
            raise DuplicateReservationError(request_id, *astuple(reservation.rank))

    @property
    def foreign_count(self) -> int:
        """Reservations of other routers."""
        return len(self._foreign)

    def active(self, rank: Rank) -> ActiveSequences:
        """What this rank, which has a slot, is busy with; to read."""
        active = self._by_rank.get(rank)
        return ActiveSequences(self._trie, self._table.slot(rank)) if active is None else active

    def write_depths(self, sequence_hashes: HashArray, depths: SlotDepths) -> None:
        """Leading blocks of a prompt that each slot is busy with, where it is with any."""
        self._trie.write_depths(sequence_hashes, depths)

    def shared(self, request_id: str) -> SharedReservation | None:
        """One of our reservations as other routers are told of it, if there is one. O(blocks)."""
        reservation = self._by_id.get(request_id)
        if reservation is None:
            return None
        active = self._by_rank[reservation.rank]
        footprint = active.footprint(request_id)
        hashes = footprint.sequence_hashes[:MAX_SHARED_BLOCKS]
        return SharedReservation(
            request_id,
            reservation.rank,
            pack_hashes(hashes),
            footprint.own_blocks + len(footprint.sequence_hashes) - len(hashes),
            footprint.isl_tokens,
            footprint.cached_tokens,
            footprint.block_size,
            active.progress(request_id),
        )

    def all_shared(self) -> Iterator[SharedReservation]:
        """All of ours as other routers are told of them, the one without progress longest first."""
        found = (self.shared(request_id) for request_id in self._by_id)
        return (each for each in found if each is not None)

    def book(self, request_id: BookingId, rank: Rank, footprint: Footprint, now_s: float) -> None:
        """Book a request on a rank that has a slot. Raises DuplicateReservationError.

        O(nodes on its way).
        """
        if request_id in self:
            raise DuplicateReservationError(_name(request_id), *astuple(self._rank(request_id)))
        active = self._by_rank.get(rank)
        if active is None:
            slot = self._table.slot(rank)
            active = self._by_rank[rank] = ActiveSequences(self._trie, slot)
        active.add(request_id, footprint, now_s)
        self._note(rank, active)
        if isinstance(request_id, str):
            self._by_id[request_id] = Reservation(rank, now_s + self._ttl_s)
            self._tell(request_id)
        else:
            self._foreign[request_id] = rank

    def prefill_complete(self, request_id: BookingId, now_s: float) -> Rank:
        """Its prompt is computed; idempotent. Raises ReservationNotFoundError."""
        rank = self.progress(request_id, now_s)
        active = self._by_rank[rank]
        active.prefill_complete(request_id, now_s)
        self._note(rank, active)
        if isinstance(request_id, str):
            self._tell(request_id)
        return rank

    def add_output_blocks(
        self, request_id: BookingId, blocks: int, decay_fraction: float | None, now_s: float
    ) -> Rank:
        """It grew. Raises ReservationNotFoundError."""
        rank = self.progress(request_id, now_s)
        active = self._by_rank[rank]
        active.add_output_blocks(request_id, blocks, decay_fraction)
        self._note(rank, active)
        if isinstance(request_id, str) and self.ledger is not None:
            self.ledger.touch_later(request_id)
        return rank

    def prefilling(self, request_id: str) -> tuple[Rank, Footprint] | None:
        """Where one of our requests is booked whose prompt is not complete, and what as."""
        reservation = self._by_id.get(request_id)
        if reservation is None:
            return None
        active = self._by_rank[reservation.rank]
        if active.progress(request_id).is_prefill_complete:
            return None
        return reservation.rank, active.footprint(request_id)

    def progress(self, request_id: BookingId, now_s: float) -> Rank:
        """It lives, whatever it does. Raises ReservationNotFoundError."""
        rank = self._rank(request_id)
        if isinstance(request_id, str):
            self._by_id[request_id] = Reservation(rank, now_s + self._ttl_s)
            self._by_id.move_to_end(request_id)
        return rank

    def free(self, request_id: BookingId, now_s: float) -> Rank:
        """It ended. O(nodes on its way). Raises ReservationNotFoundError."""
        rank = self._rank(request_id)
        active = self._by_rank[rank]
        active.free(request_id, now_s)
        if not active.active_requests:
            del self._by_rank[rank]
        self._note(rank, active)
        if isinstance(request_id, str):
            del self._by_id[request_id]
            self._tell(request_id)
        else:
            del self._foreign[request_id]
        return rank

    def drop_rank(self, rank: Rank) -> list[BookingId]:
        """Free everything booked on a rank; the ids. O(its reservations)."""
        active = self._by_rank.get(rank)
        if active is None:
            return []
        ids = active.request_ids
        for request_id in ids:
            self.free(request_id, active.head_since_s)
        return ids

    def expire(self, now_s: float) -> list[tuple[str, Rank]]:
        """Free those of ours without progress for the time to live. O(expired)."""
        expired = []
        while self._by_id:
            request_id, reservation = next(iter(self._by_id.items()))
            if reservation.expires_s > now_s:
                break
            expired.append((request_id, self.free(request_id, now_s)))
        return expired

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(everything)."""
        self._trie.check_invariants()
        expiries = [reservation.expires_s for reservation in self._by_id.values()]
        assert expiries == sorted(expiries)
        ours = [(request_id, each.rank) for request_id, each in self._by_id.items()]
        ranks: list[tuple[BookingId, Rank]] = [*ours, *self._foreign.items()]
        for rank, active in self._by_rank.items():
            active.check_invariants()
            here = [request_id for request_id, its_rank in ranks if its_rank == rank]
            assert active.active_requests == len(here) > 0
            assert all(request_id in active for request_id in here)
        for rank in self._table:
            row = self._table.row(rank)[PREFILL_TOKENS : DECODING_KV_TOKENS + 1]
            assert tuple(row) == _columns(self.active(rank))

    def _rank(self, request_id: BookingId) -> Rank:
        if isinstance(request_id, str):
            reservation = self._by_id.get(request_id)
            rank = None if reservation is None else reservation.rank
        else:
            rank = self._foreign.get(request_id)
        if rank is None:
            raise ReservationNotFoundError(_name(request_id))
        return rank

    def _tell(self, request_id: str) -> None:
        if self.ledger is not None:
            self.ledger.touch(request_id)

    def _note(self, rank: Rank, active: ActiveSequences) -> None:
        self._table.row(rank)[PREFILL_TOKENS : DECODING_KV_TOKENS + 1] = _columns(active)


def _name(request_id: BookingId) -> str:
    return request_id if isinstance(request_id, str) else request_id[1]


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
