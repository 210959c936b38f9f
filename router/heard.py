"""Workers that neither announce themselves nor are registered: they are heard, and so exist."""

from typing import ClassVar

from msgspec import Struct

from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.values import Rank


class HeardFrom(Struct, frozen=True):
    """Where a rank's events come from: another fleet, by its address."""

    address: str


class HeardWorker(WorkerAnnouncement, frozen=True, kw_only=True):
    """A worker with the ranks heard so far. What the wire does not say of it is configured, and its
    silence says nothing for a long time.
    """

    reports_load: ClassVar[bool] = False
    agent_is_engine: bool = False
    dp_ranks: tuple[int, ...]
    heard_from: HeardFrom

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks heard so far, in order; there may be gaps."""
        return tuple(Rank(self.worker_id, dp_rank) for dp_rank in self.dp_ranks)

    def source(self, _: Rank) -> Struct | None:
        """Where a rank's events come from: not from the agents' bus."""
        return self.heard_from
