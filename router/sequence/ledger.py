"""Our reservations, as the other routers are told of them.

Nothing is queued for them: whatever happens to a request only notes its id, and a frame says how
each noted one stands by then. So a request that comes and goes between two frames costs nothing,
one that grows twice is told of once, and what waits is bounded by what is live or was told.

    touch, touch_later ──▶ ids ──▶ take_frame ──▶ Frame     `look` knows how a request stands
                                        └─ told ──▶ snapshot
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from router.protocol.replicas import Frame, Progress, SharedReservation, SnapshotPart
from router.sequence.shared_reservations import SharedReservations

Look: TypeAlias = Callable[[str], SharedReservation | None]
"""How one of our reservations stands; None: it has ended."""

HEARTBEAT_S = 0.2
"""So often a router says something, even if nothing happened."""

GROWTH_S = 0.25
"""So often the others are told of output blocks, which are many and weigh little."""

MAX_CHANGES = 250
MAX_BYTES = 256 * 1024
"""What a message holds at most, hashes being the bulk, but for one reservation more: it takes those
who read it a few milliseconds.
"""


class _News:
    """What a message tells of."""

    __slots__ = ("_bytes", "added", "freed", "progressed")

    def __init__(self) -> None:
        self.added: list[SharedReservation] = []
        self.progressed: list[tuple[str, Progress]] = []
        self.freed: list[str] = []
        self._bytes = 0

    @property
    def change_count(self) -> int:
        return len(self.added) + len(self.progressed) + len(self.freed)

    @property
    def is_full(self) -> bool:
        return self._bytes >= MAX_BYTES or self.change_count == MAX_CHANGES

    def add(self, reservation: SharedReservation) -> None:
        self.added.append(reservation)
        self._bytes += len(reservation.sequence_hashes)


class Ledger:
    """What we have told the others, and what is to be told next.

    `wake` is called when there is something to tell that cannot wait, and was not before.
    Invariant: whatever differs between what we told and how our requests stand is noted.
    """

    __slots__ = ("_grown", "_growth_due_s", "_heartbeat_due_s", "_incarnation",
                 "_told", "_touched", "_wake", "router_id", "sequence")  # fmt: skip

    def __init__(
        self, router_id: int, incarnation: int, wake: Callable[[], None] = lambda: None
    ) -> None:
        self.router_id = router_id
        self._wake = wake
        self._incarnation = incarnation
        self._told = SharedReservations()
        self._touched: OrderedDict[str, None] = OrderedDict()
        self._grown: dict[str, None] = {}
        self._growth_due_s = float("-inf")
        self._heartbeat_due_s = float("-inf")
        self.sequence = 0

    def touch(self, request_id: str) -> None:
        """Something happened to one of our requests that the others have to know."""
        if not self._touched:
            self._wake()
        self._touched[request_id] = None

    def touch_later(self, request_id: str) -> None:
        """Something happened that can wait for GROWTH_S."""
        self._grown[request_id] = None

    def greet(self) -> None:
        """Let the next frame be due at once: somebody is here who has not heard us yet."""
        self._wake()
        self._heartbeat_due_s = float("-inf")

    def take_frame(self, look: Look, now_s: float) -> Frame | None:
        """The next frame; None while there is nothing to say. O(what it tells)."""
        if self._grown and now_s >= self._growth_due_s:
            self._growth_due_s = now_s + GROWTH_S
            self._touched.update(self._grown)
            self._grown.clear()
        news = _News()
        while self._touched and not news.is_full:
            request_id, _ = self._touched.popitem(last=False)
            self._tell(request_id, look(request_id), news)
        if news.change_count:
            self.sequence += 1
        elif now_s < self._heartbeat_due_s:
            return None
        self._heartbeat_due_s = now_s + HEARTBEAT_S
        return self._frame(news)

    @property
    def is_behind(self) -> bool:
        """Did the last frame have no room for all there was to say?"""
        return bool(self._touched)

    def snapshot(self) -> Iterator[SnapshotPart]:
        """All that we have told up to the last frame, in parts that are made as they are taken."""
        shares, sequence = _shares(self._told), self.sequence
        return (
            SnapshotPart(self.router_id, self._incarnation, sequence, part, len(shares), share)
            for part, share in enumerate(shares)
        )

    def check_invariants(self, live: dict[str, SharedReservation]) -> None:
        """Assert the invariant in the class's docstring. O(everything)."""
        self._told.check_invariants()
        noted = self._touched.keys() | self._grown.keys()
        told = {each.request_id: each for each in self._told}
        assert all(told.get(i) == live.get(i) for i in told.keys() | live.keys() if i not in noted)

    def _tell(self, request_id: str, after: SharedReservation | None, news: _News) -> None:
        before = self._told.get(request_id)
        if after is None:
            if self._told.pop(request_id) is not None:
                news.freed.append(request_id)
        elif after != before:
            self._told.put(after)
            if before is not None and before.is_same_booking(after):
                news.progressed.append((request_id, after.progress))
            else:
                news.add(after)

    def _frame(self, news: _News) -> Frame:
        return Frame(
            self.router_id,
            self._incarnation,
            self.sequence,
            tuple(news.added),
            tuple(news.progressed),
            tuple(news.freed),
            len(self._told),
            self._told.digest,
        )


def _shares(reservations: Iterable[SharedReservation]) -> list[tuple[SharedReservation, ...]]:
    """All of them, each share as much as a message holds; an empty one for none."""
    shares, news = [], _News()
    for each in reservations:
        if news.is_full:
            shares.append(tuple(news.added))
            news = _News()
        news.add(each)
    return [*shares, tuple(news.added)]
