"""Who booked what, where, until when: the reservations of all ranks."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct
from msgspec.structs import astuple

from router.errors import DuplicateReservationError, ReservationNotFoundError
from router.protocol.replicas import SharedReservation
from router.protocol.values import HashArray, Rank, pack_hashes
from router.sequence.active import ActiveSequences, BookingId, ForeignId, Prediction
from router.sequence.footprint import Footprint
from router.sequence.growth import Growth
from router.sequence.ledger import Ledger
from router.sequence.prompt_trie import PromptTrie, SlotDepths
from router.sequence.rank_table import (
    DECODING_KV_TOKENS,
    EAGLE,
    GROWING_REQUESTS,
    GROWING_SINCE_S,
    PREFILL_TOKENS,
    RankTable,
)
from router.sequence.recent_ends import RecentEnds
from router.sequence.silence import Silence


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
    not expire here. `growing`: requests that grow untold. `ledger`, where there is one, notes every
    change of ours; `silence` notes how ours end. Time never goes back.

    Invariants: every reservation is in exactly one rank's sequences; ours are in the order in which
    they expire; no rank is kept without reservations; a rank's columns are what its sequences say.
    """

    __slots__ = (
        "_by_id",
        "_by_rank",
        "_ends",
        "_foreign",
        "_table",
        "_trie",
        "_ttl_s",
        "growing",
        "ledger",
        "silence",
    )

    def __init__(self, ttl_s: float, table: RankTable) -> None:
        self._ttl_s = ttl_s
        self._table = table
        self._trie = PromptTrie()
        self._by_id: OrderedDict[str, Reservation] = OrderedDict()
        self._foreign: dict[ForeignId, Rank] = {}
        self._by_rank: dict[Rank, ActiveSequences] = {}
        self.growing: dict[Rank, Growth] = {}
        self._ends = RecentEnds()
        self.ledger: Ledger | None = None
        self.silence = Silence()

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
    def ranks(self) -> Iterable[Rank]:
        """Those with reservations."""
        return self._by_rank

    @property
    def foreign_count(self) -> int:
        """Reservations of other routers."""
        return len(self._foreign)

    def active(self, rank: Rank) -> ActiveSequences:
        """What this rank, which has a slot, is busy with; to read."""
        active = self._by_rank.get(rank)
        return ActiveSequences(self._trie, self._table.slot(rank)) if active is None else active

    def write_depths(self, sequence_hashes: HashArray, depths: SlotDepths) -> bool:
        """Leading blocks of a prompt that each slot is busy with, where it is with any; False: none
        is.
        """
        return self._trie.write_depths(sequence_hashes, depths)

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
        active.add(request_id, footprint, now_s, self._ends.of(rank))
        self._note(rank, active)
        if isinstance(request_id, str):
            self._by_id[request_id] = Reservation(rank, now_s + self._ttl_s)
            self._tell(request_id)
        else:
            self._foreign[request_id] = rank

    def prefill_complete(
        self, request_id: BookingId, now_s: float, *, in_batch: bool = False
    ) -> Rank:
        """Its prompt is computed; idempotent. Raises ReservationNotFoundError.

        What is told `in_batch` is told from time to time: until the next time it grows untold.
        """
        rank = self.progress(request_id, now_s)
        active = self._by_rank[rank]
        active.prefill_complete(request_id, now_s)
        self._note(rank, active)
        self._note_told(request_id, rank, now_s, in_batch)
        if isinstance(request_id, str):
            self._tell(request_id)
        return rank

    def add_output_blocks(
        self,
        request_id: BookingId,
        blocks: int,
        decay_fraction: float | None,
        now_s: float,
        *,
        in_batch: bool = False,
    ) -> Rank:
        """It grew; see `prefill_complete`. Raises ReservationNotFoundError."""
        rank = self.progress(request_id, now_s)
        active = self._by_rank[rank]
        active.add_output_blocks(request_id, blocks, decay_fraction)
        self._note(rank, active)
        self._note_told(request_id, rank, now_s, in_batch)
        if isinstance(request_id, str) and self.ledger is not None:
            self.ledger.touch_later(request_id)
        return rank

    def take_prediction(self, request_id: str) -> tuple[Rank, Prediction] | None:
        """What was expected of a request's prompt, and where; None where nobody expected anything,
        and after the first time. Raises ReservationNotFoundError.
        """
        rank = self._rank(request_id)
        taken = self._by_rank[rank].take_prediction(request_id)
        if taken is None or taken.footprint.is_prefilled_elsewhere:
            return None
        return rank, taken

    def is_eagle(self, rank: Rank) -> bool:
        """Whether the engine of a rank that has a slot drops a block of what it could reuse."""
        return bool(self._table.row(rank)[EAGLE])

    def progress(self, request_id: BookingId, now_s: float) -> Rank:
        """It lives, whatever it does. Raises ReservationNotFoundError."""
        rank = self._rank(request_id)
        if isinstance(request_id, str):
            self._by_id[request_id] = Reservation(rank, now_s + self._ttl_s)
            self._by_id.move_to_end(request_id)
        return rank

    def end_overdue(self, rank: Rank, now_s: float, seconds: Callable[[Footprint], float]) -> None:
        """Take for complete the prompts of a rank that should be; see `ActiveSequences`."""
        active = self._by_rank[rank]
        active.end_overdue(now_s, seconds)
        self._note(rank, active)

    def free(self, request_id: BookingId, now_s: float) -> Rank:
        """It ended, as somebody says. O(nodes on its way). Raises ReservationNotFoundError."""
        active = self._by_rank[self._rank(request_id)]
        if isinstance(request_id, str):
            self.silence.note(is_told=active.is_told_complete(request_id))
        return self._drop(request_id, now_s)

    def drop_rank(self, rank: Rank) -> list[BookingId]:
        """Free everything booked on a rank; the ids. O(its reservations)."""
        active = self._by_rank.get(rank)
        if active is None:
            self._ends.forget(rank)
            return []
        ids = active.request_ids
        for request_id in ids:
            self._drop(request_id, active.head_since_s)
        self._ends.forget(rank)
        return ids

    def expire(self, now_s: float) -> list[tuple[str, Rank]]:
        """Free those of ours without progress for the time to live. O(expired)."""
        expired = []
        self._ends.expire(now_s)
        while self._by_id:
            request_id, reservation = next(iter(self._by_id.items()))
            if reservation.expires_s > now_s:
                break
            expired.append((request_id, self._drop(request_id, now_s)))
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
            assert tuple(row) == self.active(rank).columns
            growth = self.growing.get(rank, Growth())
            growth.check_invariants()
            row = self._table.row(rank)[GROWING_REQUESTS : GROWING_SINCE_S + 1]
            assert row.tolist() == [len(growth), growth.since_s]
            assert all(self._by_rank[rank].is_decoding(each) for each in growth)
        assert all(map(len, self.growing.values()))

    def _rank(self, request_id: BookingId) -> Rank:
        if isinstance(request_id, str):
            reservation = self._by_id.get(request_id)
            rank = None if reservation is None else reservation.rank
        else:
            rank = self._foreign.get(request_id)
        if rank is None:
            raise ReservationNotFoundError(_name(request_id))
        return rank

    def _drop(self, request_id: BookingId, now_s: float) -> Rank:
        rank = self._rank(request_id)
        active = self._by_rank[rank]
        self._ends.note(rank, active.footprint(request_id).sequence_hashes, now_s)
        active.free(request_id, now_s)
        if not active.active_requests:
            del self._by_rank[rank]
        self._note(rank, active)
        self._note_dropped(request_id, rank)
        if isinstance(request_id, str):
            del self._by_id[request_id]
            self._tell(request_id)
        else:
            del self._foreign[request_id]
        return rank

    def _note_told(self, request_id: BookingId, rank: Rank, now_s: float, in_batch: bool) -> None:
        growth = self.growing.get(rank)
        is_growing = growth is not None and request_id in growth
        if not (in_batch or is_growing) or not self._by_rank[rank].is_decoding(request_id):
            return
        if growth is None:
            growth = self.growing[rank] = Growth()
        growth.note(request_id, now_s)
        self._write_growth(rank, growth)

    def _note_dropped(self, request_id: BookingId, rank: Rank) -> None:
        growth = self.growing.get(rank)
        if growth is None or request_id not in growth:
            return
        growth.drop(request_id)
        self._write_growth(rank, growth)
        if not len(growth):
            del self.growing[rank]

    def _write_growth(self, rank: Rank, growth: Growth) -> None:
        self._table.row(rank)[GROWING_REQUESTS : GROWING_SINCE_S + 1] = len(growth), growth.since_s

    def _tell(self, request_id: str) -> None:
        if self.ledger is not None:
            self.ledger.touch(request_id)

    def _note(self, rank: Rank, active: ActiveSequences) -> None:
        self._table.row(rank)[PREFILL_TOKENS : DECODING_KV_TOKENS + 1] = active.columns


def _name(request_id: BookingId) -> str:
    return request_id if isinstance(request_id, str) else request_id[1]
