"""Our reservations, as published to the other routers.

No queue is kept: an event of a request only notes the request's id, and a frame contains the state
of each noted request at that time. So a request that begins and ends between two frames costs
nothing, one that grows twice is published once, and the pending ids are bounded by the live and the
published requests.

    touch, touch_later ──▶ ids ──▶ take_frame ──▶ Frame     `look` returns a request's state
                                        └─ published ──▶ snapshot
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from router.protocol.replicas import Frame, Progress, SharedReservation, SnapshotPart
from router.sequence.replicas.reservation_digest import ReservationDigest

Look: TypeAlias = Callable[[str], SharedReservation | None]
"""A function that returns the state of one of our reservations, or None if it has ended."""

HEARTBEAT_S = 0.2
"""The interval of frames while nothing happens."""

GROWTH_S = 0.25
"""The interval in which output blocks are published, which are many and weigh little."""

MAX_CHANGES = 250
MAX_BYTES = 256 * 1024
"""Limits of a message, which may exceed them by one reservation.

Hashes make up most of the bytes. Receivers handle such a message in a few milliseconds.
"""


class _Pending:
    """The changes that a message contains."""

    __slots__ = ("_bytes", "added", "change_count", "freed", "progressed")

    def __init__(self) -> None:
        self.added: list[SharedReservation] = []
        self.progressed: list[tuple[str, Progress]] = []
        self.freed: list[str] = []
        self.change_count = 0
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        return self.change_count >= MAX_CHANGES or self._bytes >= MAX_BYTES

    def add(self, reservation: SharedReservation) -> None:
        self.added.append(reservation)
        self.change_count += 1
        self._bytes += len(reservation.sequence_hashes)

    def note(self, before: SharedReservation | None, after: SharedReservation) -> None:
        """Add a reservation, or the progress of a published one."""
        if before is None or not before.is_same_booking(after):
            self.add(after)
        else:
            self.progressed.append((after.request_id, after.progress))
            self.change_count += 1

    def free(self, request_id: str) -> None:
        self.freed.append(request_id)
        self.change_count += 1


class ReservationLog:
    """The reservations published to the other routers, and the changes still to be published.

    `wake` is called when an urgent change is noted and none was pending. Invariant: every request
    with a state that differs from the published one is noted.
    """

    __slots__ = ("_grown", "_growth_due_s", "_heartbeat_due_s", "_incarnation",
                 "_published", "_touched", "_wake", "router_id", "sequence")  # fmt: skip

    def __init__(
        self, router_id: int, incarnation: int, wake: Callable[[], None] = lambda: None
    ) -> None:
        self.router_id = router_id
        self._wake = wake
        self._incarnation = incarnation
        self._published = ReservationDigest()
        self._touched: OrderedDict[str, None] = OrderedDict()
        self._grown: dict[str, None] = {}
        self._growth_due_s = float("-inf")
        self._heartbeat_due_s = float("-inf")
        self.sequence = 0

    def touch(self, request_id: str) -> None:
        """Note a change of one of our requests that is published with the next frame."""
        if not self._touched:
            self._wake()
        self._touched[request_id] = None

    def touch_later(self, request_id: str) -> None:
        """Note a change that may wait for GROWTH_S."""
        self._grown[request_id] = None

    def request_frame(self) -> None:
        """Make the next frame due at once, for a router that has received none of our frames."""
        self._wake()
        self._heartbeat_due_s = float("-inf")

    def take_frame(self, look: Look, now_s: float) -> Frame | None:
        """Return the next frame, or None while none is due. O(its changes)."""
        if self._grown and now_s >= self._growth_due_s:
            self._growth_due_s = now_s + GROWTH_S
            self._touched.update(self._grown)
            self._grown.clear()
        pending = _Pending()
        while self._touched and not pending.is_full:
            request_id, _ = self._touched.popitem(last=False)
            self._add_change(request_id, look(request_id), pending)
        if pending.change_count:
            self.sequence += 1
        elif now_s < self._heartbeat_due_s:
            return None
        self._heartbeat_due_s = now_s + HEARTBEAT_S
        return self._frame(pending)

    @property
    def is_behind(self) -> bool:
        """True if the last frame had no room for all pending changes."""
        return bool(self._touched)

    def snapshot(self) -> Iterator[SnapshotPart]:
        """Return everything published up to the last frame, in parts that are built lazily."""
        shares, sequence = _shares(self._published), self.sequence
        return (
            SnapshotPart(self.router_id, self._incarnation, sequence, part, len(shares), share)
            for part, share in enumerate(shares)
        )

    def check_invariants(self, live: dict[str, SharedReservation]) -> None:
        """Assert the invariant in the class's docstring. O(everything)."""
        self._published.check_invariants()
        noted = self._touched.keys() | self._grown.keys()
        published = {each.request_id: each for each in self._published}
        assert all(
            published.get(i) == live.get(i)
            for i in published.keys() | live.keys()
            if i not in noted
        )

    def _add_change(
        self, request_id: str, after: SharedReservation | None, pending: _Pending
    ) -> None:
        before = self._published.get(request_id)
        if after is None:
            if before is not None:
                self._published.pop(request_id)
                pending.free(request_id)
        elif after is not before and after != before:
            self._published.put(after)
            pending.note(before, after)

    def _frame(self, pending: _Pending) -> Frame:
        return Frame(
            self.router_id,
            self._incarnation,
            self.sequence,
            tuple(pending.added),
            tuple(pending.progressed),
            tuple(pending.freed),
            len(self._published),
            self._published.digest,
        )


def _shares(reservations: Iterable[SharedReservation]) -> list[tuple[SharedReservation, ...]]:
    """Split reservations into shares that each fit a message; one empty share if there are none."""
    shares, pending = [], _Pending()
    for each in reservations:
        if pending.is_full:
            shares.append(tuple(pending.added))
            pending = _Pending()
        pending.add(each)
    return [*shares, tuple(pending.added)]
