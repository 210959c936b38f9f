"""The commands of a router whose sessions stay where they were served first."""

from router.commands import Commands
from router.core import RouterCore
from router.metrics import RouterMetrics
from router.outbox import Outbox
from router.protocol.replies import Decision
from router.protocol.requests import SelectRequest
from router.protocol.values import Rank
from router.session_binder import SessionBinder


class SessionCommands(Commands):
    """As `Commands`, but a request goes where its session is bound, and binds it where it went."""

    def __init__(
        self, core: RouterCore, outbox: Outbox, metrics: RouterMetrics, binder: SessionBinder
    ) -> None:
        super().__init__(core, outbox, metrics)
        self._binder = binder

    async def select(self, request: SelectRequest) -> Decision:
        """Choose a rank; books and binds nothing."""
        return await super().select(await self._binder.directed(request))

    async def select_and_reserve(self, request: SelectRequest) -> Decision:
        """Choose a rank, book it and bind the session; where another router was quicker to bind
        it, the booking is undone and made there.
        """
        directed = await self._binder.directed(request)
        decision = await super().select_and_reserve(directed)
        chosen = Rank(decision.worker_id, decision.dp_rank)
        instead = await self._binder.bind(directed, chosen)
        if instead is None or request.request_id is None:
            return decision
        self.free(request.request_id)
        return await super().select_and_reserve(instead)
