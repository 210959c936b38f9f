"""Expected placements of other routers, while bookings are not yet known to all."""

from collections.abc import Container, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from router.protocol.replicas import SharedReservation
from router.protocol.values import Rank
from router.scheduler._herd_kernel import (
    END,
    FIRST,
    LOWER_IDS,
    OURS,
    RECEIVED,
    ROW_COLUMNS,
    SLOT,
    note_ours,
    note_theirs,
)
from router.sequence.active.footprint import Footprint
from router.sequence.rank_table import RankTable

FloatArray = npt.NDArray[np.float64]

FIRST_ROWS = 64

NO_SLOT = -1


class ExpectedLoad(Struct, frozen=True, eq=False, gc=False):
    """The load that a router expects the others to place, at a time.

    `_herd_kernel.py` names the columns.

    `estimate`: a copy. `ours`: our bookings, of which the estimate names the first and the end.
    """

    estimate: FloatArray
    ours: FloatArray


ALONE = ExpectedLoad(np.empty(0), np.empty((0, ROW_COLUMNS)))
"""The value if there are no other routers."""


class HerdEstimate:
    """An estimate learned from our bookings and others'; inactive without other routers.

    `others`: the routers that place beside us, by id, with their numbers in order of ids.
    """

    __slots__ = ("_estimate", "_ours", "_router_id", "_table", "others")

    def __init__(self, router_id: int, table: RankTable) -> None:
        self._router_id = router_id
        self._table = table
        self.others: dict[int, int] = {}
        self._estimate: FloatArray = np.zeros(RECEIVED)
        self._ours: FloatArray = np.empty((FIRST_ROWS, ROW_COLUMNS))

    def note_ours(self, rank: Rank, footprint: Footprint, now_s: float) -> None:
        """Record a booking of ours, where other routers place too. O(those routers)."""
        slot, isl_tokens = self._table.slot(rank), footprint.isl_tokens
        cached_tokens = footprint.cached_tokens
        while not note_ours(self._estimate, self._ours, slot, isl_tokens, cached_tokens, now_s):
            self._make_room()

    def note_theirs(
        self, router_id: int, booked: Sequence[SharedReservation], now_s: float
    ) -> None:
        """Record new bookings of another router. O(bookings)."""
        if router_id not in self.others:
            self._follow({**self._received(), router_id: 0.0})
        sizes = [(each.isl_tokens, each.cached_tokens) for each in booked]
        number = self.others[router_id]
        note_theirs(self._estimate, self._ours, number, np.array(sizes, np.int64), now_s)

    def keep(self, router_ids: Container[int]) -> None:
        """Forget the routers that are not among these."""
        received = self._received()
        kept = {each: received[each] for each in received if each in router_ids}
        if len(kept) < len(received):
            self._follow(kept)

    def forget_rank(self, rank: Rank) -> None:
        """Forget the rank of bookings, before its slot is given to another rank."""
        slot = self._table.find(rank)
        if slot is not None:
            self._ours = self._ours.copy()  # decisions refer to the array
            self._ours[self._ours[:, SLOT] == slot, SLOT] = NO_SLOT

    def expected(self, router_id: int) -> float:
        """Return how many requests another router places per request of ours, on average."""
        ours = float(self._estimate[OURS])
        return self._received().get(router_id, 0.0) / ours if ours else 0.0

    def claims(self) -> ExpectedLoad:
        """Return what is expected of other routers now."""
        return ExpectedLoad(self._estimate.copy(), self._ours) if self.others else ALONE

    def _received(self) -> dict[int, float]:
        numbers = self._estimate[RECEIVED:].tolist()
        return {router_id: numbers[number] for router_id, number in self.others.items()}

    def _follow(self, received: dict[int, float]) -> None:
        """Set the other routers."""
        ids = sorted(received)
        self.others = {router_id: number for number, router_id in enumerate(ids)}
        numbers = [received[router_id] for router_id in ids]
        self._estimate = np.concatenate([self._estimate[:RECEIVED], numbers])
        self._estimate[LOWER_IDS] = sum(router_id < self._router_id for router_id in ids)

    def _make_room(self) -> None:
        """Replace the array by another one. Decisions that refer to the array keep it."""
        live = self._ours[int(self._estimate[FIRST]) : int(self._estimate[END])]
        self._ours = np.empty((max(2 * len(live), FIRST_ROWS), ROW_COLUMNS))
        self._ours[: len(live)] = live
        self._estimate[FIRST], self._estimate[END] = 0.0, len(live)
