"""Expected placements of other routers, while bookings are not yet known to all."""

from bisect import bisect_left
from collections import deque
from collections.abc import Container, Iterator, Sequence
from itertools import count

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from router.protocol.replicas import SharedReservation
from router.protocol.values import Rank
from router.sequence.active.footprint import Footprint


class UnpublishedBooking(Struct, frozen=True):
    """A booking of ours that others may not know: tokens to compute, and n · (cached + n / 2)."""

    booked_s: float
    rank: Rank
    tokens: int
    contexts: float


class ExpectedLoad(Struct, frozen=True, eq=False):
    """Requests that other routers are expected to place at this time.

    `turns`: probability of each, in the order in which routers take ranks; 0 is our own turn.
    `tokens`, `contexts`, `isl_tokens`: those of an average request, to compute and in total.
    `ours`: our bookings that the other routers do not see when they choose.
    """

    turns: npt.NDArray[np.float64]
    tokens: float
    contexts: float
    isl_tokens: float
    ours: Sequence[UnpublishedBooking]

    def __bool__(self) -> bool:
        return len(self.turns) > 0

    def unseen(self, ranks: Sequence[Rank]) -> npt.NDArray[np.float64]:
        """Return rows {position, tokens, contexts, booked} of `ours` on these ordered ranks."""
        rows = []
        for each in self.ours:
            position = bisect_left(ranks, each.rank)
            if position < len(ranks) and ranks[position] == each.rank:
                rows.append((position, each.tokens, each.contexts, each.booked_s))
        return np.array(rows).reshape(-1, 4)


NO_CLAIMS = ExpectedLoad(np.empty(0), 0.0, 0.0, 0.0, ())
"""The value if other routers exist, but are not expected to place requests now."""


SPREAD_S = 0.025
"""Time after which every router knows of a booking: the interval of frames, and the transfer."""

MEMORY = 0.99
"""Decay of all sums with each booking."""

LEAST_EXPECTED = 0.5
"""Least number of unseen requests of others, on average, that is taken into account."""

MOST_TURNS = 64


class _Usual(Struct):
    """Decayed sums over recent bookings: their number, and their sizes."""

    bookings: float = 0.0
    tokens: float = 0.0
    contexts: float = 0.0
    isl_tokens: float = 0.0

    def note(self, isl_tokens: int, cached_tokens: int) -> None:
        tokens = max(isl_tokens - cached_tokens, 0)
        self.bookings = self.bookings * MEMORY + 1
        self.tokens = self.tokens * MEMORY + tokens
        self.contexts = self.contexts * MEMORY + tokens * (cached_tokens + tokens / 2)
        self.isl_tokens = self.isl_tokens * MEMORY + isl_tokens


class HerdEstimate:
    """An estimate learned from our bookings and others'; inactive without other routers.

    `received`: for each other router, the number of its bookings received within twice SPREAD_S
    after one of ours, summed over ours. Those were made without knowledge of ours, or ours without
    knowledge of them.
    """

    __slots__ = ("_ours", "_router_id", "_unspread", "_usual", "received")

    def __init__(self, router_id: int) -> None:
        self._router_id = router_id
        self.received: dict[int, float] = {}
        self._ours = 0.0
        self._unspread: deque[UnpublishedBooking] = deque()
        self._usual = _Usual()

    def note_ours(self, rank: Rank, footprint: Footprint, now_s: float) -> None:
        """Record a booking of ours. O(routers that place beside us)."""
        if not self.received:
            return
        self._forget(now_s)
        self._ours = self._ours * MEMORY + 1
        for router_id in self.received:
            self.received[router_id] *= MEMORY
        self._usual.note(footprint.isl_tokens, footprint.cached_tokens)
        tokens, contexts = footprint.prefill_work
        self._unspread.append(UnpublishedBooking(now_s, rank, tokens, contexts))

    def note_theirs(self, router_id: int, booked: SharedReservation, now_s: float) -> None:
        """Record a new booking of another router. Amortised O(1)."""
        self._forget(now_s)
        self.received[router_id] = self.received.get(router_id, 0.0) + len(self._unspread)
        self._usual.note(booked.isl_tokens, booked.cached_tokens)

    def keep(self, router_ids: Container[int]) -> None:
        """Forget the routers that are not among these."""
        for gone in [each for each in self.received if each not in router_ids]:
            del self.received[gone]

    def expected(self, router_id: int) -> float:
        """Return how many requests another router places per request of ours, on average."""
        return self.received.get(router_id, 0.0) / self._ours if self._ours else 0.0

    def claims(self, now_s: float) -> ExpectedLoad | None:
        """Return the expected unseen placements now. Returns None if there are no other routers.

        Has no turns if fewer than LEAST_EXPECTED requests are expected. O(turns), at most
        MOST_TURNS.
        """
        if not self.received:
            return None
        expected = {router_id: self.expected(router_id) for router_id in self.received}
        if sum(expected.values()) < LEAST_EXPECTED:
            return NO_CLAIMS
        ours = tuple(each for each in self._unspread if now_s - each.booked_s <= SPREAD_S)
        turns = np.fromiter(self._turns(expected), np.float64)
        usual, bookings = self._usual, self._usual.bookings
        return ExpectedLoad(
            turns,
            usual.tokens / bookings,
            usual.contexts / bookings,
            usual.isl_tokens / bookings,
            ours,
        )

    def _turns(self, expected: dict[int, float]) -> Iterator[float]:
        """Yield the weight of each turn: rounds of all routers in order of ids; ours are 0."""
        ids = sorted([*expected, self._router_id])
        taken = 0
        for done in count():
            weights = {each: min(left - done, 1.0) for each, left in expected.items()}
            if max(weights.values()) <= 0:
                return
            for router_id in ids:
                weight = weights.get(router_id, 0.0)
                if weight > 0 or router_id == self._router_id:
                    yield weight
                    taken += 1
                    if taken == MOST_TURNS:
                        return

    def _forget(self, now_s: float) -> None:
        while self._unspread and now_s - self._unspread[0].booked_s > 2 * SPREAD_S:
            self._unspread.popleft()
