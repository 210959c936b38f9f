"""Commands over NATS, the same as over HTTP, as request and reply.

message ─▶ headers, caller, size ─▶ command, by its `method` ─▶ the caller's commands ─▶ reply
"""

import logging
from collections.abc import Callable
from typing import Any

from nats.aio.msg import Msg

from router.api.batches import BatchCommands
from router.api.commands import Commands, PendingRequest
from router.api.errors import AnswerTooLargeError
from router.api.rpc.call import RpcRequest
from router.api.rpc.codecs import JSON, MSGPACK
from router.api.rpc.responder import BusResponse, Later, Responder
from router.api.rpc.verbs import batch_reply, new_reply, reply_to
from router.core.commands import Free
from router.errors import KvRouterError
from router.observability.metrics import RouterMetrics
from router.protocol.commands import BatchCommand, Command, NewCommand
from router.protocol.replies import Decision
from router.protocol.subjects import Subjects
from router.runtime.bus.connection import Bus
from router.runtime.http_server.config import BodyConfig
from router.runtime.process.errors import BodyTooLargeError
from router.runtime.process.request_ids import ANSWERED
from router.runtime.security.guard import Guard

log = logging.getLogger(__name__)

QUEUE_GROUP = "router"
BOOKING = "select_and_reserve"


class Rpc:
    """A responder to commands on the router's subject.

    It shares a queue group with the other routers, and checks each caller with the guard.
    """

    def __init__(
        self,
        commands: Commands,
        metrics: RouterMetrics,
        subjects: Subjects,
        guard: Guard,
        bodies: BodyConfig,
        max_requests: int,
    ) -> None:
        self._commands = commands
        self._guard = guard
        self._batches = {
            codec: BatchCommands(commands, guard, codec.decoder) for codec in (JSON, MSGPACK)
        }
        self._metrics = metrics
        self._body_limit_bytes = bodies.body_limit_bytes
        self._answer_limit_bytes = 0
        self._answering = Responder(
            subjects.router, QUEUE_GROUP, self._answer, self._refuse, metrics, max_requests
        )

    def reconfigure(self, bodies: BodyConfig) -> None:
        """Apply changed limits."""
        self._body_limit_bytes = bodies.body_limit_bytes

    async def run(self, bus: Bus, listening: Callable[[], None]) -> None:
        """Respond until cancelled or drained; `listening` is called once it is subscribed."""
        self._answer_limit_bytes = bus.client.max_payload
        await self._answering.run(bus, listening)

    async def drain(self) -> None:
        """Accept no more requests, and finish the accepted ones. Raises BusUnavailableError."""
        await self._answering.drain()

    async def _answer(self, message: Msg) -> BusResponse | Later:
        call = RpcRequest(message)
        ANSWERED.set(call.ids)
        try:
            call.open()
            call.admit(self._guard)
            if len(message.data) > self._body_limit_bytes:
                raise BodyTooLargeError(self._body_limit_bytes)
            async with call.in_time():
                command = await call.command(message.data, self._guard)
                reply = await self._reply(call, command)
        except KvRouterError as error:
            return self._refused(call, error)
        if isinstance(reply, PendingRequest):
            return self._placed(call, _shape(command), reply)
        return self._answered(call, reply)

    async def _reply(self, call: RpcRequest, command: Command) -> Any:
        if isinstance(command, BatchCommand):
            return await batch_reply(self._batches[call.codec], command, call.caller)
        return await reply_to(self._commands, command, call.caller, call.headers)

    async def _placed(
        self, call: RpcRequest, shape: Callable[[Decision], Any], wait: PendingRequest
    ) -> BusResponse:
        """Wait for a queued request, which is withdrawn at its caller's timeout."""
        try:
            async with call.in_time():
                decision = await self._commands.decision(wait, call.caller)
        except KvRouterError as error:
            return self._refused(call, error)
        return self._answered(call, shape(decision))

    def _answered(self, call: RpcRequest, reply: Any) -> BusResponse:
        answer = call.answered(reply)
        if len(answer.body) > self._answer_limit_bytes:
            if call.method == BOOKING:
                self._commands.handle(Free(reply.request_id), call.caller)
            return self._refused(call, AnswerTooLargeError(self._answer_limit_bytes))
        self._metrics.requests.count("nats", call.method, "ok")
        if call.unknown:
            self._metrics.unknown_fields.labels("nats", call.method).inc(len(call.unknown))
        return answer

    def _refuse(self, message: Msg, error: KvRouterError) -> BusResponse:
        """Return an error for a message that is not processed."""
        call = RpcRequest(message)
        try:
            call.open()
        except KvRouterError as unreadable:
            error = unreadable
        return self._refused(call, error)

    def _refused(self, call: RpcRequest, error: KvRouterError) -> BusResponse:
        is_ours = error.http_status == 500
        log.log(logging.ERROR if is_ours else logging.DEBUG, "refused (%s): %s", error.code, error)
        self._metrics.refusals.labels("nats", error.code).inc()
        self._metrics.requests.count("nats", call.method, error.code)
        return call.refused(error)


def _shape(command: Command) -> Callable[[Decision], Any]:
    return new_reply if isinstance(command, NewCommand) else _whole


def _whole(decision: Decision) -> Decision:
    return decision
