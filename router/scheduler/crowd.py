"""What other routers place at the same moment as we do, as far as it can be expected.

Until a booking has spread, two routers decide without knowing of each other; where requests come in
bursts, all of them would run to the same idle ranks. So each router learns from what it hears soon
after its own bookings how much the others place beside it, and all take turns, in order of their
ids, through the same ranks, which each of them reckons out for itself.
"""

from collections import deque
from collections.abc import Container, Iterator
from itertools import count

import numpy as np
from msgspec import Struct

from router.protocol.replicas import SharedReservation
from router.protocol.values import Rank
from router.scheduler.claims import NO_CLAIMS, Claims, Unspread
from router.sequence.footprint import Footprint

SPREAD_S = 0.025
"""By then every router knows of a booking: a frame's interval, and its way."""

MEMORY = 0.99
"""What counted a booking ago counts this much."""

LEAST_EXPECTED = 0.5
"""Requests that others place unseen, on average, that are worth a thought."""

MOST_TURNS = 64


class _Usual(Struct):
    """Sums over the bookings of late: how many, and what they are."""

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


class Crowd:
    """Learns from bookings, ours and others'; with no other router it learns, and says, nothing.

    `heard`: of each other router, how many bookings we heard of within twice SPREAD_S after one of
    ours, summed over ours; those are the ones that were made without knowing of ours, or of which
    we did not know.
    """

    __slots__ = ("_ours", "_router_id", "_unspread", "_usual", "heard")

    def __init__(self, router_id: int) -> None:
        self._router_id = router_id
        self.heard: dict[int, float] = {}
        self._ours = 0.0
        self._unspread: deque[Unspread] = deque()
        self._usual = _Usual()

    def note_ours(self, rank: Rank, footprint: Footprint, now_s: float) -> None:
        """We booked a request. O(routers that place beside us)."""
        if not self.heard:
            return
        self._forget(now_s)
        self._ours = self._ours * MEMORY + 1
        for router_id in self.heard:
            self.heard[router_id] *= MEMORY
        self._usual.note(footprint.isl_tokens, footprint.cached_tokens)
        tokens, contexts = footprint.prefill_tokens, footprint.prefill_contexts
        self._unspread.append(Unspread(now_s, rank, tokens, contexts))

    def note_theirs(self, router_id: int, booked: SharedReservation, now_s: float) -> None:
        """We hear that another router has just booked a request. Amortised O(1)."""
        self._forget(now_s)
        self.heard[router_id] = self.heard.get(router_id, 0.0) + len(self._unspread)
        self._usual.note(booked.isl_tokens, booked.cached_tokens)

    def keep(self, router_ids: Container[int]) -> None:
        """Forget the routers that are not among these."""
        for gone in [each for each in self.heard if each not in router_ids]:
            del self.heard[gone]

    def expected(self, router_id: int) -> float:
        """How many requests another router places beside each of ours, on average."""
        return self.heard.get(router_id, 0.0) / self._ours if self._ours else 0.0

    def claims(self, now_s: float) -> Claims | None:
        """What others are expected to place unseen at this moment; None: there are no others.

        Without a turn where it is next to nothing. O(turns), of which there are at most MOST_TURNS.
        """
        if not self.heard:
            return None
        expected = {router_id: self.expected(router_id) for router_id in self.heard}
        if sum(expected.values()) < LEAST_EXPECTED:
            return NO_CLAIMS
        ours = tuple(each for each in self._unspread if now_s - each.booked_s <= SPREAD_S)
        turns = np.fromiter(self._turns(expected), np.float64)
        usual, bookings = self._usual, self._usual.bookings
        return Claims(
            turns,
            usual.tokens / bookings,
            usual.contexts / bookings,
            usual.isl_tokens / bookings,
            ours,
        )

    def _turns(self, expected: dict[int, float]) -> Iterator[float]:
        """In each round every router once, in order of ids; ours are 0."""
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
