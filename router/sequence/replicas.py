"""What all other routers have booked: one mirror each, while it is heard."""

from collections.abc import Iterable, Iterator

from msgspec import Struct

from router.protocol.replicas import Frame, SnapshotPart
from router.sequence.mirror import Mirror, MirrorCounts, PeerChange

MAX_REPLICAS = 64
"""Routers followed; what further ones say is dropped."""

SILENCE_S = 5.0
"""A router that says nothing for so long is gone, and what it booked with it."""


AWAY_S = 300.0
"""What others have booked is as good as ended, once we could not hear them for so long."""

OFTEN_ASKED = 4
"""Snapshots asked for in vain that are worth telling of: 1.75 s."""


class ReplicaCounts(Struct):
    """What happened to routers, and to what they said.

    `stale`: said in a life that has ended; `refused`: by one router too many.
    """

    frames: MirrorCounts
    met: int = 0
    gone: int = 0
    stale: int = 0
    refused: int = 0


class Replicas:
    """The other routers.

    Every change is yielded once, in order: whoever applies them all knows what every mirror does.
    Invariants: no mirror is kept of a silent router; `owners` names exactly who has booked an id.
    """

    __slots__ = ("_away_since_s", "_mirrors", "_owners", "counts", "router_id")

    def __init__(self, router_id: int) -> None:
        self.router_id = router_id
        self._mirrors: dict[int, Mirror] = {}
        self._away_since_s: float | None = None
        self._owners: dict[str, tuple[int, ...]] = {}
        self.counts = ReplicaCounts(MirrorCounts())

    def __len__(self) -> int:
        return len(self._mirrors)

    def __iter__(self) -> Iterator[Mirror]:
        return iter(self._mirrors.values())

    @property
    def in_doubt(self) -> list[int]:
        """Routers that we are known not to be up to date with."""
        return [router_id for router_id, mirror in self._mirrors.items() if mirror.is_in_doubt]

    @property
    def unanswered(self) -> list[int]:
        """Routers that were asked often what they have booked."""
        return [mirror.router_id for mirror in self if mirror.asks >= OFTEN_ASKED]

    def owners(self, request_id: str) -> tuple[int, ...]:
        """Who else has booked this id, longest ago first."""
        return self._owners.get(request_id, ())

    def take(self, message: Frame | SnapshotPart, now_s: float) -> list[PeerChange]:
        """Take in what a router says. O(what it tells)."""
        known = self._mirrors.get(message.router_id)
        if known is not None and message.incarnation == known.incarnation:
            known.heard_s = now_s
            return self._noted(_taken(known, message))
        if known is not None and message.incarnation < known.incarnation:
            self.counts.stale += 1
            return []
        return self._meet(known, message, now_s)

    def tick(self, now_s: float, *, is_connected: bool) -> list[PeerChange]:
        """Forget routers that have fallen silent; or all, once we could hear nobody for long."""
        if not is_connected:
            self._away_since_s = now_s if self._away_since_s is None else self._away_since_s
            is_gone = now_s - self._away_since_s >= AWAY_S
            return self._forget_all(list(self)) if is_gone else []
        if self._away_since_s is not None:
            self._away_since_s = None
            for mirror in self:
                mirror.heard_s = now_s
        return self._forget_all([m for m in self if now_s - m.heard_s >= SILENCE_S])

    def wanted(self, now_s: float) -> list[int]:
        """Whom to ask for a snapshot now. O(routers)."""
        return [mirror.router_id for mirror in self if mirror.ask(now_s)]

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(everything)."""
        owners: dict[str, set[int]] = {}
        for mirror in self:
            mirror.check_invariants()
            for each in mirror.reservations:
                owners.setdefault(each.request_id, set()).add(mirror.router_id)
        assert {i: set(routers) for i, routers in self._owners.items()} == owners
        assert all(len(set(routers)) == len(routers) for routers in self._owners.values())

    def _meet(
        self, earlier_life: Mirror | None, message: Frame | SnapshotPart, now_s: float
    ) -> list[PeerChange]:
        """A router that we do not know, or its new life."""
        if self.router_id == message.router_id or isinstance(message, SnapshotPart):
            return []
        if earlier_life is None and len(self) >= MAX_REPLICAS:
            self.counts.refused += 1
            return []
        changes = [] if earlier_life is None else self._forget(earlier_life)
        mirror = Mirror(message.router_id, message.incarnation, self.counts.frames, now_s)
        self._mirrors[message.router_id] = mirror
        self.counts.met += 1
        return changes + self._noted(mirror.take_frame(message))

    def _forget_all(self, mirrors: Iterable[Mirror]) -> list[PeerChange]:
        changes: list[PeerChange] = []
        for mirror in mirrors:
            self.counts.gone += 1
            changes += self._forget(mirror)
        return changes

    def _forget(self, mirror: Mirror) -> list[PeerChange]:
        del self._mirrors[mirror.router_id]
        return self._noted(
            PeerChange(mirror.router_id, each.request_id, each, None)
            for each in mirror.reservations
        )

    def _noted(self, changes: Iterable[PeerChange]) -> list[PeerChange]:
        noted = list(changes)
        for change in noted:
            if change.before is not None and change.after is not None:
                continue
            owners = [each for each in self.owners(change.request_id) if each != change.router_id]
            if change.after is not None:
                owners.append(change.router_id)
            if owners:
                self._owners[change.request_id] = tuple(owners)
            else:
                self._owners.pop(change.request_id, None)
        return noted


def _taken(mirror: Mirror, message: Frame | SnapshotPart) -> list[PeerChange]:
    if isinstance(message, Frame):
        return mirror.take_frame(message)
    return mirror.take_part(message)
