"""Several routers, which tell each other what they have booked, each message after its lag."""

from collections.abc import Sequence
from math import floor

from router.core import RouterCore
from router.effects import TellReplica
from router.protocol.replicas import Frame, ProgressTold, SnapshotPart, SnapshotWanted
from router.sequence.ledger import Ledger
from router.simulator.agenda import Agenda

FRAME_S = 0.005
"""So often the others are told what is new."""


class Peers:
    """All routers' ledgers; one router alone tells nobody."""

    __slots__ = ("_agenda", "_due", "_lag_s", "_ledgers")

    def __init__(self, agenda: Agenda, cores: Sequence[RouterCore], lag_s: float) -> None:
        self._agenda = agenda
        self._lag_s = lag_s
        self._due: dict[RouterCore, None] = {}
        self._ledgers: dict[RouterCore, Ledger] = {}
        if len(cores) > 1:
            for core in cores:
                router_id = core.foreign.replicas.router_id
                core.tracker.ledger = self._ledgers[core] = Ledger(router_id, incarnation=1)

    def stir(self, core: RouterCore) -> None:
        """Something may have happened to a router's bookings: its next frame tells."""
        if core in self._ledgers and core not in self._due:
            self._due[core] = None
            frames = floor(self._agenda.now_s / FRAME_S) + 1
            self._agenda.at(max(frames * FRAME_S, self._agenda.now_s), self._tell, core)

    def send(self, sender: RouterCore, effect: TellReplica) -> None:
        """Tell one of the others something, or send what it has booked to whoever lacks it."""
        for core, ledger in self._ledgers.items():
            if ledger.router_id == effect.router_id:
                self._agenda.after(self._lag_s, self._be_told, core, effect.message, sender)

    def _be_told(
        self, core: RouterCore, message: ProgressTold | SnapshotWanted, sender: RouterCore
    ) -> None:
        if isinstance(message, ProgressTold):
            self._hear(core, message)
            return
        for part in self._ledgers[core].snapshot():
            self._agenda.after(self._lag_s, self._hear, sender, part)

    def _hear(self, core: RouterCore, message: Frame | SnapshotPart | ProgressTold) -> None:
        for effect in core.apply_peer(message, self._agenda.now_s):
            if isinstance(effect, TellReplica):
                self.send(core, effect)

    def _tell(self, core: RouterCore) -> None:
        del self._due[core]
        ledger = self._ledgers[core]
        while (frame := ledger.take_frame(core.tracker.shared, self._agenda.now_s)) is not None:
            for other in self._ledgers:
                if other is not core:
                    self._agenda.after(self._lag_s, self._hear, other, frame)
            if not ledger.is_behind:
                break
