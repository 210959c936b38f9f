"""The reservations of all other routers: one mirror for each router that sends messages."""

from collections.abc import Iterable, Iterator

from msgspec import Struct

from router.protocol.replicas import Frame, SnapshotPart
from router.sequence.replicas.peer_reservations import PeerChange, PeerCounts, PeerReservations

MAX_REPLICAS = 64
"""The limit of followed routers; messages of further ones are dropped."""

SILENCE_S = 5.0
"""The timeout after which a silent router and its reservations are removed."""


AWAY_S = 300.0
"""The time without a connection after which all other routers' reservations are removed."""

OFTEN_ASKED = 4
"""The number of unsuccessful snapshot requests that is worth reporting: reached after 1.75 s."""


class ReplicaCounts(Struct):
    """Counts of routers and of their messages.

    `stale`: messages of an ended incarnation; `refused`: messages of routers beyond MAX_REPLICAS.
    """

    frames: PeerCounts
    met: int = 0
    gone: int = 0
    stale: int = 0
    refused: int = 0


class ReplicaSet:
    """The other routers.

    Every change is returned once, in order, so applying all of them reproduces the mirrors.
    `booked`: the routers that have booked an id, oldest booking first; read-only.
    Invariants: no mirror of a silent router is kept; `owners` returns exactly the routers that have
    booked an id.
    """

    __slots__ = ("_away_since_s", "_mirrors", "booked", "counts", "router_id")

    def __init__(self, router_id: int) -> None:
        self.router_id = router_id
        self._mirrors: dict[int, PeerReservations] = {}
        self._away_since_s: float | None = None
        self.booked: dict[str, tuple[int, ...]] = {}
        self.counts = ReplicaCounts(PeerCounts())

    def __len__(self) -> int:
        return len(self._mirrors)

    def __iter__(self) -> Iterator[PeerReservations]:
        return iter(self._mirrors.values())

    @property
    def in_doubt(self) -> list[int]:
        """Routers with missing frames or differing digests."""
        return [router_id for router_id, mirror in self._mirrors.items() if mirror.is_in_doubt]

    @property
    def unanswered(self) -> list[int]:
        """Routers that did not respond to several snapshot requests."""
        return [mirror.router_id for mirror in self if mirror.asks >= OFTEN_ASKED]

    def owners(self, request_id: str) -> tuple[int, ...]:
        """Return the other routers that have booked this id, oldest booking first."""
        return self.booked.get(request_id, ())

    def take(self, message: Frame | SnapshotPart, now_s: float) -> list[PeerChange]:
        """Apply a message of a router; return the changes. O(its contents)."""
        known = self._mirrors.get(message.router_id)
        if known is not None and message.incarnation == known.incarnation:
            known.last_seen_s = now_s
            return self._noted(_taken(known, message))
        if known is not None and message.incarnation < known.incarnation:
            self.counts.stale += 1
            return []
        return self._add_peer(known, message, now_s)

    def tick(self, now_s: float, *, is_connected: bool) -> list[PeerChange]:
        """Remove silent routers, or all after AWAY_S without a connection; return the changes."""
        if not is_connected:
            self._away_since_s = now_s if self._away_since_s is None else self._away_since_s
            is_gone = now_s - self._away_since_s >= AWAY_S
            return self._forget_all(list(self)) if is_gone else []
        if self._away_since_s is not None:
            self._away_since_s = None
            for mirror in self:
                mirror.last_seen_s = now_s
        return self._forget_all([m for m in self if now_s - m.last_seen_s >= SILENCE_S])

    def wanted(self, now_s: float) -> list[int]:
        """Return the routers to request a snapshot from now. O(routers)."""
        return [mirror.router_id for mirror in self if mirror.request_snapshot(now_s)]

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(everything)."""
        owners: dict[str, set[int]] = {}
        for mirror in self:
            mirror.check_invariants()
            for each in mirror.reservations:
                owners.setdefault(each.request_id, set()).add(mirror.router_id)
        assert {i: set(routers) for i, routers in self.booked.items()} == owners
        assert all(len(set(routers)) == len(routers) for routers in self.booked.values())

    def _add_peer(
        self, earlier_life: PeerReservations | None, message: Frame | SnapshotPart, now_s: float
    ) -> list[PeerChange]:
        """Add a mirror for an unknown router, or for a new incarnation; return the changes."""
        if self.router_id == message.router_id or isinstance(message, SnapshotPart):
            return []
        if earlier_life is None and len(self) >= MAX_REPLICAS:
            self.counts.refused += 1
            return []
        changes = [] if earlier_life is None else self._forget(earlier_life)
        mirror = PeerReservations(message.router_id, message.incarnation, self.counts.frames, now_s)
        self._mirrors[message.router_id] = mirror
        self.counts.met += 1
        return changes + self._noted(mirror.take_frame(message))

    def _forget_all(self, mirrors: Iterable[PeerReservations]) -> list[PeerChange]:
        changes: list[PeerChange] = []
        for mirror in mirrors:
            self.counts.gone += 1
            changes += self._forget(mirror)
        return changes

    def _forget(self, mirror: PeerReservations) -> list[PeerChange]:
        del self._mirrors[mirror.router_id]
        return self._noted(
            [
                PeerChange(mirror.router_id, each.request_id, each, None)
                for each in mirror.reservations
            ]
        )

    def _noted(self, changes: list[PeerChange]) -> list[PeerChange]:
        for change in changes:
            if change.before is None:
                self._begin(change.router_id, change.request_id)
            elif change.after is None:
                self._end(change.router_id, change.request_id)
        return changes

    def _begin(self, router_id: int, request_id: str) -> None:
        owners = self.booked.get(request_id)
        if owners is None:
            self.booked[request_id] = (router_id,)
        else:
            self.booked[request_id] = (*(each for each in owners if each != router_id), router_id)

    def _end(self, router_id: int, request_id: str) -> None:
        owners = self.booked.pop(request_id, ())
        if len(owners) > 1:
            self.booked[request_id] = tuple(each for each in owners if each != router_id)


def _taken(mirror: PeerReservations, message: Frame | SnapshotPart) -> list[PeerChange]:
    if isinstance(message, Frame):
        return mirror.take_frame(message)
    return mirror.take_part(message)
