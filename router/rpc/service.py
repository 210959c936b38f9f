"""NATS: the same commands as over HTTP, as request and reply.

message ─▶ headers, caller, size ─▶ command, by its `method` ─▶ the caller's commands ─▶ reply
"""

import logging
from collections.abc import Callable
from typing import Any

from nats.aio.msg import Msg

from router.answering import Answering, BusAnswer, Later
from router.batches import BatchCommands
from router.body_errors import BodyTooLargeError
from router.commands import Commands, Wait
from router.errors import KvRouterError
from router.index_errors import AnswerTooLargeError
from router.metrics import RouterMetrics
from router.process.request_ids import ANSWERED
from router.protocol.commands import BatchCommand, Command, NewCommand
from router.protocol.replies import Decision
from router.protocol.subjects import Subjects
from router.publisher.bus import Bus
from router.rpc.call import Call
from router.rpc.codecs import JSON, MSGPACK
from router.rpc.verbs import answered, batch_answered, new_reply
from router.security.guard import Guard
from router.service_config import ServiceConfig
from router.tenant_commands import commands_of

log = logging.getLogger(__name__)

QUEUE_GROUP = "router"
BOOKING = "select_and_reserve"


class Rpc:
    """Answers commands that the guard admits on the router's subject, in a queue group with the
    other routers.
    """

    def __init__(
        self,
        commands: Commands,
        metrics: RouterMetrics,
        subjects: Subjects,
        guard: Guard,
        config: ServiceConfig,
    ) -> None:
        self._commands = commands
        self._guard = guard
        self._batches = {
            codec: BatchCommands(commands, guard, codec.decoder) for codec in (JSON, MSGPACK)
        }
        self._metrics = metrics
        self._body_limit_bytes = config.body_limit_bytes
        self._answer_limit_bytes = 0
        limit = config.max_bus_requests
        self._answering = Answering(
            subjects.router, QUEUE_GROUP, self._answer, self._refuse, metrics, limit
        )

    def reconfigure(self, config: ServiceConfig) -> None:
        """Go on with other limits."""
        self._body_limit_bytes = config.body_limit_bytes

    async def run(self, bus: Bus, listening: Callable[[], None]) -> None:
        """Answer until cancelled, or drained; `listening` is called once we are heard."""
        self._answer_limit_bytes = bus.client.max_payload
        await self._answering.run(bus, listening)

    async def drain(self) -> None:
        """Take no more, and wait until what was taken is answered. Raises BusUnavailableError."""
        await self._answering.drain()

    async def _answer(self, message: Msg) -> BusAnswer | Later:
        call = Call(message)
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
        if isinstance(reply, Wait):
            return self._placed(call, _shape(command), reply)
        return self._answered(call, reply)

    async def _reply(self, call: Call, command: Command) -> Any:
        if isinstance(command, BatchCommand):
            return await batch_answered(self._batches[call.codec], command, call.caller)
        return await answered(self._commands_of(call), command, call.headers)

    def _commands_of(self, call: Call) -> Commands:
        return commands_of(self._commands, call.caller)

    async def _placed(self, call: Call, shape: Callable[[Decision], Any], wait: Wait) -> BusAnswer:
        """A request that has to wait is withdrawn when its caller does not any more."""
        try:
            async with call.in_time():
                decision = await self._commands_of(call).decision(wait)
        except KvRouterError as error:
            return self._refused(call, error)
        return self._answered(call, shape(decision))

    def _answered(self, call: Call, reply: Any) -> BusAnswer:
        answer = call.answered(reply)
        if len(answer.body) > self._answer_limit_bytes:
            if call.method == BOOKING:
                self._commands_of(call).free(reply.request_id)
            return self._refused(call, AnswerTooLargeError(self._answer_limit_bytes))
        self._metrics.requests.count("nats", call.method, "ok")
        if call.unknown:
            self._metrics.unknown_fields.labels("nats", call.method).inc(len(call.unknown))
        return answer

    def _refuse(self, message: Msg, error: KvRouterError) -> BusAnswer:
        """A message that nobody looks into."""
        call = Call(message)
        try:
            call.open()
        except KvRouterError as unreadable:
            error = unreadable
        return self._refused(call, error)

    def _refused(self, call: Call, error: KvRouterError) -> BusAnswer:
        is_ours = error.http_status == 500
        log.log(logging.ERROR if is_ours else logging.DEBUG, "refused (%s): %s", error.code, error)
        self._metrics.refusals.labels("nats", error.code).inc()
        self._metrics.requests.count("nats", call.method, error.code)
        return call.refused(error)


def _shape(command: Command) -> Callable[[Decision], Any]:
    return new_reply if isinstance(command, NewCommand) else _whole


def _whole(decision: Decision) -> Decision:
    return decision
