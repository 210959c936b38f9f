"""The reservations of all ranks: the booked requests, their ranks and their expiry."""

from collections.abc import Iterator
from math import nan
from typing import TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple, replace

from router.protocol.replicas import Progress, SharedReservation
from router.protocol.values import Rank
from router.sequence.active import _booking_kernel as kernels
from router.sequence.active import _booking_steps as columns
from router.sequence.active._booking_rows import (
    BOOKING_FIGURES,
    BOOKINGS,
    SLOT_FIGURES,
    Floats,
    Ints,
)
from router.sequence.active.booking_memory import BookingMemory
from router.sequence.active.errors import DuplicateReservationError, ReservationNotFoundError
from router.sequence.active.footprint import Footprint
from router.sequence.active.promises import Promises
from router.sequence.active.usage_prediction import Ends, Prediction, RecentCompletions
from router.sequence.rank_table import (
    DECODE_BLOCKS,
    DECODING_KV_TOKENS,
    DECODING_REQUESTS,
    EAGLE,
    GROWING_REQUESTS,
    GROWING_SINCE_S,
    HEAD_TOKENS,
    PREFILL_TOKENS,
    QUEUED_CONTEXTS,
    QUEUED_TOKENS,
    REQUESTS,
    RankTable,
)
from router.sequence.replicas.reservation_log import ReservationLog

ForeignId: TypeAlias = tuple[int, str]
"""A request of another router: the router's id and the request's id."""

BookingId: TypeAlias = str | ForeignId
"""The id of a request of this router, or of another router."""

MEMORY = 0.99
"""The decay of the moving average per ended request."""

USUAL = 0.1
"""The share of requests that usually end for other reasons before their prompt is computed."""


class InferredPrefillEnd:
    """The moving share of ended requests without a report of their completed prompt."""

    __slots__ = ("_share",)

    def __init__(self) -> None:
        self._share = 0.0

    @property
    def is_usual(self) -> bool:
        """True if completion reports cannot be relied upon."""
        return self._share > USUAL

    def note(self, *, is_reported: bool) -> None:
        """Record the end of a request; `is_reported`: its completed prompt was reported."""
        self._share = MEMORY * self._share + (1 - MEMORY) * (not is_reported)


class RankLoad(Struct, frozen=True):
    """The booked load of one rank. `decoding_requests`: those with a completed prompt."""

    active_blocks: int
    active_prefill_tokens: int
    active_requests: int
    decoding_requests: int


class FirstToken(Struct, frozen=True, gc=False):
    """A first token, `waited_s` after its prompt was booked.

    `tokens` were computed for it, with the attention work `contexts`. Beside it, `requests`
    requests with `kv_tokens` tokens decoded.
    """

    waited_s: float
    tokens: float
    contexts: float
    requests: float
    kv_tokens: float


class _Booked(Struct, eq=False, gc=False):
    """A booked request. `ends`: the requests that had recently ended on its rank, until compared.

    `ends` is None once its usage was compared. `shared`: its last state as published.
    """

    request_id: BookingId
    rank: Rank
    footprint: Footprint
    ends: Ends | None
    shared: SharedReservation | None = None


class Tracker:
    """The reservations by id, by rank and by expiry, and the table columns computed from them.

    Reservations of other routers add the same load as ours, but are not counted by `len` and do not
    expire here; `foreign_count` is their number. `by_id`: the booking of each id, read-only.
    `state`: their arrays, for kernels that read them. `promises`: of those with objectives, which
    end with their booking. `ledger`, if set, notes every change of ours;
    `silence` records how ours end. Time never goes back.

    Invariants: every reservation has one booking in the arrays; ours are in the order in which they
    expire; a rank's columns match its bookings.
    """

    __slots__ = (
        "_bookings",
        "_ends",
        "_memory",
        "_table",
        "_ttl_s",
        "by_id",
        "foreign_count",
        "ledger",
        "promises",
        "silence",
        "state",
    )

    def __init__(self, ttl_s: float, table: RankTable) -> None:
        self._ttl_s = ttl_s
        self._table = table
        self._memory = BookingMemory()
        self.state = self._memory.state
        self.by_id: dict[BookingId, int] = {}
        self._bookings: dict[int, _Booked] = {}
        self.foreign_count = 0
        self._ends = RecentCompletions()
        self.promises = Promises(table)
        self.ledger: ReservationLog | None = None
        self.silence = InferredPrefillEnd()

    def __len__(self) -> int:
        return len(self.by_id) - self.foreign_count

    def __contains__(self, request_id: BookingId) -> bool:
        return request_id in self.by_id

    def rank(self, request_id: BookingId) -> Rank | None:
        """Return the rank of a booked request, or None."""
        booking = self.by_id.get(request_id)
        return None if booking is None else self._bookings[booking].rank

    def active(self, rank: Rank) -> RankLoad:
        """Return the booked load of a rank that has a slot."""
        row = self._table.row(rank)
        return RankLoad(
            int(row[DECODE_BLOCKS]),
            int(row[PREFILL_TOKENS]),
            int(row[REQUESTS]),
            int(row[DECODING_REQUESTS]),
        )

    def expiries(self) -> list[tuple[str, float]]:
        """Return our reservations with the times of their expiry, the next one first. O(ours)."""
        figures = self._memory.rows(BOOKING_FIGURES)
        return [
            (self._our_id(booking), float(figures[booking, columns.EXPIRES_S]))
            for booking in self._listed(-1)
        ]

    def shared(self, request_id: str) -> SharedReservation | None:
        """Return one of our reservations as published to other routers, or None.

        O(blocks) at the first call, then O(1).
        """
        booking = self.by_id.get(request_id)
        if booking is None:
            return None
        booked = self._bookings[booking]
        is_complete, output_blocks, decay = kernels.reported(self.state, booking)
        progress = Progress(is_complete, output_blocks, None if decay != decay else decay)
        if booked.shared is None:
            booked.shared = booked.footprint.shared(request_id, booked.rank, progress)
        elif booked.shared.progress != progress:
            booked.shared = replace(booked.shared, progress=progress)
        return booked.shared

    def all_shared(self) -> Iterator[SharedReservation]:
        """Yield our reservations as published to other routers, the least recent progress first."""
        found = (self.shared(self._our_id(booking)) for booking in self._listed(-1).tolist())
        return (each for each in found if each is not None)

    def book(self, request_id: BookingId, rank: Rank, footprint: Footprint, now_s: float) -> None:
        """Book a request on a rank that has a slot. Raises DuplicateReservationError.

        O(nodes on its path).
        """
        if request_id in self.by_id:
            raise DuplicateReservationError(
                _name(request_id), *astuple(self._booked(request_id).rank)
            )
        is_ours, slot = isinstance(request_id, str), self._table.slot(rank)
        hashes = footprint.sequence_hashes
        expires_s = now_s + self._ttl_s if is_ours else nan
        booking = 0
        while not booking:
            booking, prompt = kernels.book(
                self.state,
                self._table.values,
                slot,
                hashes,
                footprint.own_blocks,
                footprint.isl_tokens,
                footprint.cached_tokens,
                footprint.block_size,
                footprint.expected_output_tokens or 0,
                now_s,
                expires_s,
            )
            if not booking:
                self._memory.make_room(slot)
        self._memory.hashes[prompt] = hashes
        self.by_id[request_id] = booking
        self._bookings[booking] = _Booked(
            request_id, rank, footprint, self._ends.by_rank.get(rank, ())
        )
        if not isinstance(request_id, str):
            self.foreign_count += 1
        elif self.ledger is not None:
            self.ledger.touch(request_id)

    def prefill_complete(
        self, request_id: BookingId, now_s: float, *, in_batch: bool = False
    ) -> None:
        """Mark a request's prompt as complete. Idempotent. Raises ReservationNotFoundError.

        `in_batch`: the caller reports from time to time, so the output grows unreported in between.
        """
        booking = self._booking(request_id)
        expires_s = now_s + self._ttl_s
        kernels.complete(self.state, self._table.values, booking, now_s, expires_s, in_batch)
        if self.promises.live and not in_batch and isinstance(request_id, str):
            self.promises.first_token(request_id, now_s)
        if self.ledger is not None and isinstance(request_id, str):
            self.ledger.touch(request_id)

    def add_output_blocks(
        self,
        request_id: BookingId,
        blocks: int,
        decay_fraction: float | None,
        now_s: float,
        *,
        in_batch: bool = False,
    ) -> None:
        """Add output blocks; see `prefill_complete`. Raises ReservationNotFoundError.

        `decay_fraction`: the new weight of every block that only this request holds. If None, it is
        the remaining part of the expected output, if a length is expected.
        """
        booking = self._booking(request_id)
        decay, expires_s = nan if decay_fraction is None else decay_fraction, now_s + self._ttl_s
        kernels.add_output(
            self.state, self._table.values, booking, blocks, decay, now_s, expires_s, in_batch
        )
        if self.ledger is not None and isinstance(request_id, str):
            self.ledger.touch_later(request_id)

    def take_prediction(self, request_id: str) -> tuple[Rank, Prediction] | None:
        """Return the rank of a request and the prediction for its prompt, at the first call.

        Returns None at later calls, and if the prompt was prefilled elsewhere. Raises
        ReservationNotFoundError.
        """
        booking = self._booking(request_id)
        booked = self._bookings[booking]
        footprint, ends = booked.footprint, booked.ends
        booked.ends = None
        if ends is None or footprint.is_prefilled_elsewhere:
            return None
        in_flight = int(self._memory.rows(BOOKINGS)[booking, columns.IN_FLIGHT_BLOCKS])
        booked_s = float(self._memory.rows(BOOKING_FIGURES)[booking, columns.BOOKED_S])
        return booked.rank, Prediction(footprint, in_flight, ends, booked_s)

    def is_eagle(self, rank: Rank) -> bool:
        """Return whether the engine of a rank with a slot drops a block of the reusable ones."""
        return bool(self._table.row(rank)[EAGLE])

    def progress(self, request_id: BookingId, now_s: float) -> None:
        """Renew the expiry of a request. Raises ReservationNotFoundError."""
        kernels.renew(self.state, self._booking(request_id), now_s + self._ttl_s)

    def end_overdue(self, now_s: float) -> None:
        """Assume complete all prompts that should be by now. O(ranks + those prompts)."""
        kernels.end_overdue(self.state, self._table.values, now_s)

    def subtract_progress(self, rows: Floats, slots: Ints, now_s: float) -> None:
        """Subtract from copies of ranks' rows what their engines should have computed by now.

        O(prompts being computed).
        """
        kernels.subtract_progress(self.state, rows, slots, now_s)

    def arrived(self) -> Floats:
        """Return a copy of what was ever booked on each slot, by the columns ARRIVED_….

        Slots that were never booked may be missing. The sums outlive the ranks of their slots.
        """
        return self._memory.rows(SLOT_FIGURES)[:, columns.ARRIVED_REQUESTS :].copy()

    def take_first_tokens(self) -> list[tuple[Rank, FirstToken]]:
        """Return the first tokens since the last call that teach how fast their ranks are.

        Those of prompts with no other prompt ahead of them, reported as they came. O(ranks), if
        there are any.
        """
        taken = self._memory.take_first_tokens().tolist()
        if not taken:
            return []
        ranks = {self._table.slot(rank): rank for rank in self._table}
        return [(ranks[int(slot)], FirstToken(*rest)) for slot, *rest in taken]

    def free(
        self,
        request_id: BookingId,
        now_s: float,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """End a request as reported. O(nodes on its path). Raises ReservationNotFoundError.

        `cached_tokens`: the cached part of its prompt, and `output_tokens`: its output, if its
        engine reports them.
        """
        booking, cached = self._booking(request_id), -1 if cached_tokens is None else cached_tokens
        if self.promises.live and isinstance(request_id, str):
            self.promises.end(request_id, now_s, output_tokens)
        was_reported = self._drop(request_id, booking, now_s, cached)
        if isinstance(request_id, str):
            self.silence.note(is_reported=was_reported)

    def drop_rank(self, rank: Rank) -> list[BookingId]:
        """Free all reservations on a rank; return their ids. O(its reservations)."""
        slot = self._table.find(rank)
        found = [] if slot is None else self._listed(slot).tolist()
        ids = [self._bookings[booking].request_id for booking in found]
        for request_id, booking in zip(ids, found, strict=True):
            self._drop(request_id, booking, 0.0)
        self._ends.forget(rank)
        if slot is not None:
            self._memory.drop_first_tokens(slot)
        return ids

    def expire(self, now_s: float) -> list[tuple[str, Rank]]:
        """Free those of ours without progress for the time to live. O(expired)."""
        expired = []
        self._ends.expire(now_s)
        while booking := kernels.overdue(self.state, now_s):
            request_id = self._our_id(booking)
            expired.append((request_id, self._bookings[booking].rank))
            self._drop(request_id, booking, now_s)
        return expired

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(everything)."""
        self._memory.check_invariants()
        self.promises.check_invariants()
        assert self.promises.live.keys() <= self.by_id.keys()
        assert {each.request_id: booking for booking, each in self._bookings.items()} == self.by_id
        expiries = [expires_s for _, expires_s in self.expiries()]
        assert expiries == sorted(expiries)
        assert len(expiries) == len(self)
        rows, figures = self._memory.rows(BOOKINGS), self._memory.rows(BOOKING_FIGURES)
        for rank in self._table:
            found = self._listed(self._table.slot(rank))
            assert [self._bookings[booking].rank for booking in found.tolist()] == [rank] * len(
                found
            )
            row, stages = self._table.row(rank), rows[found, columns.STAGE]
            queued = found[stages == columns.QUEUED]
            tokens, unshared = rows[found][:, [columns.PREFILL_TOKENS, columns.UNSHARED_TOKENS]].T
            assert row[REQUESTS] == len(found)
            assert row[DECODING_REQUESTS] == len(found) - len(queued)
            assert row[PREFILL_TOKENS] == tokens[stages != columns.COMPLETE].sum()
            assert row[QUEUED_TOKENS] == unshared[stages == columns.QUEUED].sum()
            assert row[QUEUED_CONTEXTS] == figures[queued, columns.CONTEXTS].sum()
            assert not len(queued) or row[HEAD_TOKENS] == rows[queued[0], columns.UNSHARED_TOKENS]
            decoding = found[stages != columns.QUEUED]
            assert row[DECODING_KV_TOKENS] == rows[decoding, columns.KV_TOKENS].sum()
            reported_s = figures[decoding, columns.REPORTED_S]
            assert row[GROWING_REQUESTS] == np.isfinite(reported_s).sum()
            assert abs(row[GROWING_SINCE_S] - np.nansum(reported_s)) < 1e-6

    def _booking(self, request_id: BookingId) -> int:
        booking = self.by_id.get(request_id)
        if booking is None:
            raise ReservationNotFoundError(_name(request_id))
        return booking

    def _booked(self, request_id: BookingId) -> _Booked:
        return self._bookings[self.by_id[request_id]]

    def _our_id(self, booking: int) -> str:
        request_id = self._bookings[booking].request_id
        assert isinstance(request_id, str)
        return request_id

    def _drop(
        self, request_id: BookingId, booking: int, now_s: float, cached_tokens: int = -1
    ) -> bool:
        """Remove a booking. Returns whether its prompt was reported complete."""
        booked = self._bookings.pop(booking)
        del self.by_id[request_id]
        self._ends.note(booked.rank, booked.footprint.sequence_hashes, now_s)
        was_reported, freed, more = kernels.free(
            self.state, self._table.values, booking, now_s, cached_tokens
        )
        self._memory.hashes[freed] = None
        if more:
            self._memory.forget(more)
        if not isinstance(request_id, str):
            self.foreign_count -= 1
        elif self.ledger is not None:
            self.ledger.touch(request_id)
        if self.promises.live and isinstance(request_id, str):
            self.promises.drop(request_id)
        return bool(was_reported)

    def _listed(self, slot: int) -> Ints:
        found = np.empty(len(self._bookings), np.int64)
        return found[: kernels.list_bookings(self.state, slot, found)]


def _name(request_id: BookingId) -> str:
    return request_id if isinstance(request_id, str) else request_id[1]
