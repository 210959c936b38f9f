"""The reservations of one other router, as far as received.

frame in order ──▶ applied ──▶ count and digest compared ──▶ other ones: in doubt
frame too early ─▶ held: in doubt                                          │
                     └── applied ◀── those before it, or a snapshot ◀──────┘
"""

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from router.protocol.replicas import Frame, SharedReservation, SnapshotPart
from router.sequence.replicas.reservation_digest import ReservationDigest

HELD_FRAMES = 256
"""The limit of frames that wait for earlier frames or a snapshot.

Beyond it, the oldest are dropped: a snapshot requested now includes their changes.
"""

FIRST_RETRY_S = 0.25
LAST_RETRY_S = 4.0
"""Delays before a snapshot is requested again: the first, doubled each time up to the last."""


class PeerChange(Struct, frozen=True):
    """A change of a peer's reservation. `before` is None if it began, `after` if it ended."""

    router_id: int
    request_id: str
    before: SharedReservation | None
    after: SharedReservation | None


class PeerCounts(Struct):
    """Counts of received frames, and of the reasons for snapshots."""

    applied: int = 0
    doubled: int = 0
    missing: int = 0
    differing: int = 0
    snapshots: int = 0


class PeerReservations:
    """The reservations of one other router, in one incarnation.

    Invariants: `reservations` is what the router had published with frame `sequence`, unless its
    digest differs; no frame is held that could be applied.
    """

    __slots__ = (
        "_counts",
        "_differs",
        "_held",
        "_known_sequence",
        "_next_ask_s",
        "_parts",
        "asks",
        "incarnation",
        "last_seen_s",
        "reservations",
        "router_id",
        "sequence",
    )  # fmt: skip

    def __init__(self, router_id: int, incarnation: int, counts: PeerCounts, now_s: float) -> None:
        self.router_id = router_id
        self.incarnation = incarnation
        self.reservations = ReservationDigest()
        self.sequence = 0
        self.last_seen_s = now_s
        self._counts = counts
        self._known_sequence = 0
        self._differs = False
        self._held: dict[int, Frame] = {}
        self._parts: dict[int, SnapshotPart] = {}
        self.asks = 0
        self._next_ask_s = now_s

    @property
    def is_in_doubt(self) -> bool:
        """True if frames are missing, or the digest of the reservations differs."""
        return self._differs or self.sequence < self._known_sequence

    def take_frame(self, frame: Frame) -> list[PeerChange]:
        """Apply a frame and those that waited for it, or hold it, or drop it."""
        if frame.sequence > self._known_sequence:
            if frame.sequence > self._known_sequence + bool(frame.change_count):
                self._counts.missing += 1
            self._known_sequence = frame.sequence
        if not frame.change_count:
            self._compare(frame)
            return []
        if frame.sequence <= self.sequence or frame.sequence in self._held:
            self._counts.doubled += 1
            return []
        self._hold(frame)
        return self._apply_held()

    def take_part(self, part: SnapshotPart) -> list[PeerChange]:
        """Store a part of a snapshot. The last part replaces the reservations by the snapshot's."""
        if not self.is_in_doubt or part.sequence < self.sequence:
            return []
        begun = next(iter(self._parts.values()), part)
        if part.sequence < begun.sequence:
            return []
        if part.sequence > begun.sequence:
            self._parts.clear()
        self._parts[part.part] = part
        if len(self._parts) < part.parts:
            return []
        return self._become(part.sequence, list(self._parts.values()))

    def request_snapshot(self, now_s: float) -> bool:
        """Return whether to request a snapshot now. If so, counts it as requested."""
        if not self.is_in_doubt:
            self.asks = 0
            self._next_ask_s = now_s
            return False
        if now_s < self._next_ask_s:
            return False
        self._next_ask_s = now_s + min(FIRST_RETRY_S * 2**self.asks, LAST_RETRY_S)
        self.asks += 1
        return True

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(everything)."""
        self.reservations.check_invariants()
        assert all(self.sequence < sequence for sequence in self._held)
        assert self._differs or self.sequence + 1 not in self._held
        assert len(self._held) <= HELD_FRAMES
        assert self.is_in_doubt or not (self._held or self._parts)

    def _hold(self, frame: Frame) -> None:
        if len(self._held) == HELD_FRAMES:
            del self._held[min(self._held)]
        self._held[frame.sequence] = frame

    def _apply_held(self) -> list[PeerChange]:
        changes: list[PeerChange] = []
        while not self._differs:
            frame = self._held.pop(self.sequence + 1, None)
            if frame is None:
                break
            self.sequence = frame.sequence
            self._counts.applied += 1
            self._apply(frame, changes)
            self._compare(frame)
        if not self.is_in_doubt:
            self._parts.clear()
        return changes

    def _apply(self, frame: Frame, changes: list[PeerChange]) -> None:
        router_id, reservations = self.router_id, self.reservations
        for after in frame.added:
            before = reservations.put(after)
            changes.append(PeerChange(router_id, after.request_id, before, after))
        for request_id, progress in frame.progressed:
            before = reservations.get(request_id)
            if before is not None:
                after = replace(before, progress=progress)
                reservations.put(after)
                changes.append(PeerChange(router_id, request_id, before, after))
        for request_id in frame.freed:
            before = reservations.pop(request_id)
            if before is not None:
                changes.append(PeerChange(router_id, request_id, before, None))

    def _compare(self, frame: Frame) -> None:
        if frame.sequence != self.sequence or self._differs:
            return
        if (frame.count, frame.digest) != (len(self.reservations), self.reservations.digest):
            self._counts.differing += 1
            self._differs = True

    def _become(self, sequence: int, parts: Iterable[SnapshotPart]) -> list[PeerChange]:
        received = {each.request_id: each for part in parts for each in part.reservations}
        self._counts.snapshots += 1
        self.sequence = sequence
        self._known_sequence = max(self._known_sequence, sequence)
        self._differs = False
        self._parts.clear()
        self._held = {each: frame for each, frame in self._held.items() if each > sequence}
        changes: list[PeerChange] = []
        for gone in [
            each.request_id for each in self.reservations if each.request_id not in received
        ]:
            before = self.reservations.pop(gone)
            changes.append(PeerChange(self.router_id, gone, before, None))
        known = self.reservations
        changes += [
            self._put(each) for each in received.values() if each != known.get(each.request_id)
        ]
        return changes + self._apply_held()

    def _put(self, reservation: SharedReservation) -> PeerChange:
        before = self.reservations.put(reservation)
        return PeerChange(self.router_id, reservation.request_id, before, reservation)
