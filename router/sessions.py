"""Which rank a session is bound to, as this router knows or as all routers share it.

The binding is looked up before the core is asked and written after it has answered, so that no
decision waits for a store. The first binding wins: whoever finds that another router was quicker
places its request again, where the session is.
"""

import time
from typing import Protocol

from router.protocol.values import Rank
from router.scheduler.affinity import AffinityTable, Session


class Sessions(Protocol):
    """Bindings of sessions. Nothing is raised: without its store it knows less."""

    async def find(self, session: Session) -> Rank | None:
        """Where a session is bound."""

    async def bind(self, session: Session, rank: Rank, gone: Rank | None) -> Rank:
        """Note that a rank served a session; where it is bound from now on. The first binding
        wins, unless it is to the rank that is `gone`.
        """

    async def close(self) -> None:
        """Let go of the store."""


class LocalSessions:
    """Bindings that only this router knows, and forgets when it ends."""

    def __init__(self, table: AffinityTable) -> None:
        self.table = table

    async def find(self, session: Session) -> Rank | None:
        """Where a session is bound."""
        return self.table.find(session, time.monotonic())

    async def bind(self, session: Session, rank: Rank, gone: Rank | None) -> Rank:
        """See `AffinityTable.bind`."""
        return self.table.bind(session, rank, time.monotonic(), gone)

    async def close(self) -> None:
        """There is nothing to let go of."""
