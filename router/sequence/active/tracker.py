"""The reservations of all ranks: the booked requests, their ranks and their expiry."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple

from router.protocol.replicas import SharedReservation
from router.protocol.values import Rank, pack_hashes
from router.sequence.active.active_sequences import (
    ActiveSequences,
    BookingId,
    ForeignId,
    Prediction,
)
from router.sequence.active.errors import DuplicateReservationError, ReservationNotFoundError
from router.sequence.active.footprint import Footprint
from router.sequence.active.progress import InferredOutput, InferredPrefillEnd
from router.sequence.active.prompt_trie import PromptTrie
from router.sequence.active.recent_completions import RecentCompletions
from router.sequence.rank_table import (
    EAGLE,
    GROWING_REQUESTS,
    GROWING_SINCE_S,
    RankTable,
)
from router.sequence.replicas.reservation_log import ReservationLog


class Reservation(Struct, frozen=True, gc=False):
    """The rank on which a request is booked, and the time when it expires without progress."""

    rank: Rank
    expires_s: float


MAX_SHARED_BLOCKS = 1 << 16
"""The limit of a prompt's blocks that are published to other routers.

The blocks beyond it count as blocks that cannot be shared.
"""


class Tracker:
    """The reservations by id, by rank and by expiry, and the table columns computed from them.

    Reservations of other routers add the same load as ours, but are not counted by `len` and do not
    expire here. `ours`: our reservations, read-only. `growing`: requests that are reported in
    batches. `ledger`, if set, notes every change of ours; `silence` records how ours end.
    `write_depths`: that of the trie of all prompts. Time never goes back.

    Invariants: every reservation is in exactly one rank's sequences; ours are in the order in which
    they expire; no rank is kept without reservations; a rank's columns match its sequences.
    """

    __slots__ = (
        "_by_rank",
        "_ends",
        "_foreign",
        "_table",
        "_trie",
        "_ttl_s",
        "growing",
        "ledger",
        "ours",
        "silence",
        "write_depths",
    )

    def __init__(self, ttl_s: float, table: RankTable) -> None:
        self._ttl_s = ttl_s
        self._table = table
        self._trie = PromptTrie()
        self.write_depths = self._trie.write_depths
        self.ours: OrderedDict[str, Reservation] = OrderedDict()
        self._foreign: dict[ForeignId, Rank] = {}
        self._by_rank: dict[Rank, ActiveSequences] = {}
        self.growing: dict[Rank, InferredOutput] = {}
        self._ends = RecentCompletions()
        self.ledger: ReservationLog | None = None
        self.silence = InferredPrefillEnd()

    def __len__(self) -> int:
        return len(self.ours)

    def __contains__(self, request_id: BookingId) -> bool:
        return request_id in (self.ours if isinstance(request_id, str) else self._foreign)

    @property
    def ranks(self) -> Iterable[Rank]:
        """The ranks with reservations."""
        return self._by_rank

    @property
    def foreign_count(self) -> int:
        """The number of reservations of other routers."""
        return len(self._foreign)

    def active(self, rank: Rank) -> ActiveSequences:
        """Return the booked load of a rank that has a slot; read-only."""
        active = self._by_rank.get(rank)
        return ActiveSequences(self._trie, self._table.slot(rank)) if active is None else active

    def shared(self, request_id: str) -> SharedReservation | None:
        """Return one of our reservations as published to other routers, or None. O(blocks)."""
        reservation = self.ours.get(request_id)
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
        """Yield our reservations as published to other routers, the least recent progress first."""
        found = (self.shared(request_id) for request_id in self.ours)
        return (each for each in found if each is not None)

    def book(self, request_id: BookingId, rank: Rank, footprint: Footprint, now_s: float) -> None:
        """Book a request on a rank that has a slot. Raises DuplicateReservationError.

        O(nodes on its path).
        """
        is_ours = isinstance(request_id, str)
        if request_id in (self.ours if is_ours else self._foreign):
            raise DuplicateReservationError(_name(request_id), *astuple(self._rank(request_id)))
        active = self._by_rank.get(rank)
        if active is None:
            slot = self._table.slot(rank)
            active = self._by_rank[rank] = ActiveSequences(self._trie, slot)
        active.add(request_id, footprint, now_s, self._ends.by_rank.get(rank, ()))
        active.write(self._table.values)
        if isinstance(request_id, str):
            self.ours[request_id] = Reservation(rank, now_s + self._ttl_s)
            if self.ledger is not None:
                self.ledger.touch(request_id)
        else:
            self._foreign[request_id] = rank

    def prefill_complete(
        self, request_id: BookingId, now_s: float, *, in_batch: bool = False
    ) -> Rank:
        """Mark a request's prompt as complete. Idempotent. Raises ReservationNotFoundError.

        `in_batch`: the caller reports from time to time, so the output grows unreported in between.
        """
        rank = self.progress(request_id, now_s)
        active = self._by_rank[rank]
        active.prefill_complete(request_id, now_s)
        active.write(self._table.values)
        self._note_reported(request_id, rank, now_s, in_batch)
        if isinstance(request_id, str):
            self._touch(request_id)
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
        """Add output blocks; see `prefill_complete`. Raises ReservationNotFoundError."""
        rank = self.progress(request_id, now_s)
        active = self._by_rank[rank]
        active.add_output_blocks(request_id, blocks, decay_fraction)
        active.write(self._table.values)
        self._note_reported(request_id, rank, now_s, in_batch)
        if isinstance(request_id, str) and self.ledger is not None:
            self.ledger.touch_later(request_id)
        return rank

    def take_prediction(self, request_id: str) -> tuple[Rank, Prediction] | None:
        """Return the rank of a request and the prediction for its prompt, at the first call.

        Returns None at later calls, and if the prompt was prefilled elsewhere. Raises
        ReservationNotFoundError.
        """
        rank = self._rank(request_id)
        taken = self._by_rank[rank].take_prediction(request_id)
        if taken is None or taken.footprint.is_prefilled_elsewhere:
            return None
        return rank, taken

    def is_eagle(self, rank: Rank) -> bool:
        """Return whether the engine of a rank with a slot drops a block of the reusable ones."""
        return bool(self._table.row(rank)[EAGLE])

    def progress(self, request_id: BookingId, now_s: float) -> Rank:
        """Renew the expiry of a request. Raises ReservationNotFoundError."""
        rank = self._rank(request_id)
        if isinstance(request_id, str):
            self.ours[request_id] = Reservation(rank, now_s + self._ttl_s)
            self.ours.move_to_end(request_id)
        return rank

    def end_overdue(self, rank: Rank, now_s: float, seconds: Callable[[Footprint], float]) -> None:
        """Assume complete the overdue prompts of a rank; see `ActiveSequences.end_overdue`."""
        active = self._by_rank[rank]
        active.end_overdue(now_s, seconds)
        active.write(self._table.values)

    def free(self, request_id: BookingId, now_s: float) -> Rank:
        """End a request as reported. O(nodes on its path). Raises ReservationNotFoundError."""
        active = self._by_rank[self._rank(request_id)]
        if isinstance(request_id, str):
            self.silence.note(is_reported=active.is_reported_complete(request_id))
        return self._drop(request_id, now_s)

    def drop_rank(self, rank: Rank) -> list[BookingId]:
        """Free all reservations on a rank; return their ids. O(its reservations)."""
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
        while self.ours:
            request_id, reservation = next(iter(self.ours.items()))
            if reservation.expires_s > now_s:
                break
            expired.append((request_id, self._drop(request_id, now_s)))
        return expired

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(everything)."""
        self._trie.check_invariants()
        expiries = [reservation.expires_s for reservation in self.ours.values()]
        assert expiries == sorted(expiries)
        ours = [(request_id, each.rank) for request_id, each in self.ours.items()]
        ranks: list[tuple[BookingId, Rank]] = [*ours, *self._foreign.items()]
        for rank, active in self._by_rank.items():
            active.check_invariants()
            here = [request_id for request_id, its_rank in ranks if its_rank == rank]
            assert active.active_requests == len(here) > 0
            assert all(request_id in active for request_id in here)
        for rank in self._table:
            written = self._table.values.copy()
            self.active(rank).write(written)
            assert np.array_equal(written, self._table.values, equal_nan=True)
            growth = self.growing.get(rank, InferredOutput())
            growth.check_invariants()
            row = self._table.row(rank)[GROWING_REQUESTS : GROWING_SINCE_S + 1]
            assert row.tolist() == [len(growth), growth.since_s]
            assert all(self._by_rank[rank].is_decoding(each) for each in growth)
        assert all(map(len, self.growing.values()))

    def _rank(self, request_id: BookingId) -> Rank:
        if isinstance(request_id, str):
            reservation = self.ours.get(request_id)
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
        active.write(self._table.values)
        self._note_dropped(request_id, rank)
        if isinstance(request_id, str):
            del self.ours[request_id]
            self._touch(request_id)
        else:
            del self._foreign[request_id]
        return rank

    def _note_reported(
        self, request_id: BookingId, rank: Rank, now_s: float, in_batch: bool
    ) -> None:
        growth = self.growing.get(rank)
        is_growing = growth is not None and request_id in growth
        if not (in_batch or is_growing) or not self._by_rank[rank].is_decoding(request_id):
            return
        if growth is None:
            growth = self.growing[rank] = InferredOutput()
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

    def _write_growth(self, rank: Rank, growth: InferredOutput) -> None:
        self._table.row(rank)[GROWING_REQUESTS : GROWING_SINCE_S + 1] = len(growth), growth.since_s

    def _touch(self, request_id: str) -> None:
        if self.ledger is not None:
            self.ledger.touch(request_id)


def _name(request_id: BookingId) -> str:
    return request_id if isinstance(request_id, str) else request_id[1]
