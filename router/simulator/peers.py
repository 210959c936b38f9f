"""Simulated routers that publish their bookings to each other, each message after its lag."""

from collections.abc import Sequence
from math import floor

from router.core.commands import ApplyPeer
from router.core.core import RouterCore
from router.core.effects import TellReplica
from router.protocol.replicas import Frame, ProgressTold, SnapshotPart, SnapshotWanted
from router.sequence.replicas.reservation_log import ReservationLog
from router.simulator.agenda import EventQueue

FRAME_S = 0.005
"""The interval at which changes are published."""


class SimulatedPeers:
    """The ledgers of all routers; a single router publishes nothing."""

    __slots__ = ("_agenda", "_due", "_lag_s", "_ledgers")

    def __init__(self, agenda: EventQueue, cores: Sequence[RouterCore], lag_s: float) -> None:
        self._agenda = agenda
        self._lag_s = lag_s
        self._due: dict[RouterCore, None] = {}
        self._ledgers: dict[RouterCore, ReservationLog] = {}
        if len(cores) > 1:
            for core in cores:
                router_id = core.foreign.replicas.router_id
                core.tracker.ledger = self._ledgers[core] = ReservationLog(router_id, incarnation=1)

    def stir(self, core: RouterCore) -> None:
        """Schedule a router's next frame, because its bookings may have changed."""
        if core in self._ledgers and core not in self._due:
            self._due[core] = None
            frames = floor(self._agenda.now_s / FRAME_S) + 1
            self._agenda.at(max(frames * FRAME_S, self._agenda.now_s), self._publish, core)

    def send(self, sender: RouterCore, effect: TellReplica) -> None:
        """Send an effect's message to another router, which replies to a snapshot request."""
        for core, ledger in self._ledgers.items():
            if ledger.router_id == effect.router_id:
                self._agenda.after(self._lag_s, self._receive_events, core, effect.message, sender)

    def _receive_events(
        self, core: RouterCore, message: ProgressTold | SnapshotWanted, sender: RouterCore
    ) -> None:
        if isinstance(message, ProgressTold):
            self._receive(core, message)
            return
        for part in self._ledgers[core].snapshot():
            self._agenda.after(self._lag_s, self._receive, sender, part)

    def _receive(self, core: RouterCore, message: Frame | SnapshotPart | ProgressTold) -> None:
        for effect in core.handle(ApplyPeer(message), self._agenda.now_s)[1]:
            if isinstance(effect, TellReplica):
                self.send(core, effect)

    def _publish(self, core: RouterCore) -> None:
        del self._due[core]
        ledger = self._ledgers[core]
        while (frame := ledger.take_frame(core.tracker.shared, self._agenda.now_s)) is not None:
            for other in self._ledgers:
                if other is not core:
                    self._agenda.after(self._lag_s, self._receive, other, frame)
            if not ledger.is_behind:
                break
