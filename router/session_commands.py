"""The commands of a router whose sessions stay where they were served first."""

import time

from router.commands import Commands, Wait
from router.core import RouterCore
from router.metrics import RouterMetrics
from router.outbox import Outbox
from router.protocol.replies import Decision, ReservationReply
from router.protocol.requests import PromptRequest, SelectRequest
from router.protocol.values import Rank, Scope
from router.request_headers import bookable
from router.selections import Selections
from router.session_binder import SessionBinder
from router.waiters import Gone
from router.watch import Watch


class SessionCommands(Commands):
    """As `Commands`, but a request goes where its session is bound, and binds it where it went."""

    def __init__(
        self,
        core: RouterCore,
        outbox: Outbox,
        metrics: RouterMetrics,
        binder: SessionBinder,
        watch: Watch | None = None,
        selections: Selections | None = None,
    ) -> None:
        super().__init__(core, outbox, metrics, watch, selections)
        self._binder = binder

    def is_immediate(self, request: PromptRequest) -> bool:
        """Whether no session has to be looked up for it."""
        is_bound = isinstance(request, SelectRequest) and request.session_id is not None
        return super().is_immediate(request) and not is_bound

    async def select(self, request: SelectRequest) -> Decision:
        """Choose a rank; books and binds nothing."""
        return await super().select(await self._binder.directed(request))

    async def submit(self, request: SelectRequest) -> Decision | Wait:
        """Choose a rank, book it and bind the session; where another router was quicker to bind
        it, the booking is undone and made there. Or have the request wait.
        """
        directed = await self._binder.directed(bookable(request))
        submitted = await super().submit(directed)
        if isinstance(submitted, Wait) or submitted.request_id is None:
            return submitted
        instead = await self._binder.bind(directed, _rank(submitted))
        if instead is None:
            return submitted
        self.free(submitted.request_id)
        self._metrics.sessions.moved.inc()
        return await super().submit(instead)

    async def decision(self, wait: Wait, gone: Gone | None = None) -> Decision:
        """Where a waiting request was placed. It has waited, and is not placed a second time."""
        decision = await super().decision(wait, gone)
        await self._binder.bind(wait.request, _rank(decision))
        return decision

    async def _reserve_selected(self, scope: Scope, selection_id: str) -> ReservationReply:
        """Book what was selected, and bind its session there: its caller knows where it goes."""
        selection = self._selections.find((scope, selection_id), time.monotonic())
        reply = await super()._reserve_selected(scope, selection_id)
        if selection is not None and selection.session is not None:
            await self._binder.bind(selection.session, Rank(reply.worker_id, reply.dp_rank))
        return reply


def _rank(decision: Decision) -> Rank:
    return Rank(decision.worker_id, decision.dp_rank)
