"""NATS: the same commands as over HTTP, as request and reply.

message ─▶ headers, size, deadline ─▶ command, by its `method` ─▶ the router's commands ─▶ reply
"""

import logging
from collections.abc import Callable
from typing import Any

from nats.aio.msg import Msg

from router.answering import Answering, BusAnswer, Later
from router.commands import Commands, Wait
from router.errors import BodyTooLargeError, KvRouterError
from router.index_errors import AnswerTooLargeError
from router.metrics import RouterMetrics
from router.process.request_ids import ANSWERED
from router.protocol.commands import Command, NewCommand
from router.protocol.replies import Decision
from router.protocol.subjects import Subjects
from router.publisher.bus import Bus
from router.rpc.call import Call
from router.rpc.verbs import answered, new_reply
from router.service_config import ServiceConfig

log = logging.getLogger(__name__)

QUEUE_GROUP = "router"
UNKNOWN = "unknown"
BOOKING = "select_and_reserve"


class Rpc:
    """Answers commands on the router's subject, in a queue group with the other routers."""

    def __init__(
        self,
        commands: Commands,
        metrics: RouterMetrics,
        subjects: Subjects,
        config: ServiceConfig,
    ) -> None:
        self._commands = commands
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

    async def run(self, bus: Bus) -> None:
        """Answer until cancelled, or drained."""
        self._answer_limit_bytes = bus.client.max_payload
        await self._answering.run(bus)

    async def drain(self) -> None:
        """Take no more, and wait until what was taken is answered. Raises BusUnavailableError."""
        await self._answering.drain()

    async def _answer(self, message: Msg) -> BusAnswer | Later:
        call = Call(message)
        ANSWERED.set(call.ids)
        method = UNKNOWN
        try:
            call.open()
            if len(message.data) > self._body_limit_bytes:
                raise BodyTooLargeError(self._body_limit_bytes)
            async with call.in_time():
                command = await call.command(message.data)
                method = str(command.__struct_config__.tag)
                reply = await answered(self._commands, command, call.headers)
        except KvRouterError as error:
            return self._refused(call, method, error)
        if isinstance(reply, Wait):
            return self._placed(call, method, _shape(command), reply)
        return self._answered(call, method, reply)

    async def _placed(
        self, call: Call, method: str, shape: Callable[[Decision], Any], wait: Wait
    ) -> BusAnswer:
        """A request that has to wait is withdrawn when its caller does not any more."""
        try:
            async with call.in_time():
                decision = await self._commands.decision(wait)
        except KvRouterError as error:
            return self._refused(call, method, error)
        return self._answered(call, method, shape(decision))

    def _answered(self, call: Call, method: str, reply: Any) -> BusAnswer:
        answer = call.answered(reply)
        if len(answer.body) > self._answer_limit_bytes:
            if method == BOOKING:
                self._commands.free(reply.request_id)
            return self._refused(call, method, AnswerTooLargeError(self._answer_limit_bytes))
        self._metrics.requests.labels("nats", method, "ok").inc()
        return answer

    def _refuse(self, message: Msg, error: KvRouterError) -> BusAnswer:
        """A message that nobody looks into."""
        call = Call(message)
        try:
            call.open()
        except KvRouterError as unreadable:
            error = unreadable
        return self._refused(call, UNKNOWN, error)

    def _refused(self, call: Call, method: str, error: KvRouterError) -> BusAnswer:
        is_ours = error.http_status == 500
        log.log(logging.ERROR if is_ours else logging.DEBUG, "refused (%s): %s", error.code, error)
        self._metrics.refusals.labels("nats", error.code).inc()
        self._metrics.requests.labels("nats", method, error.code).inc()
        return call.refused(error)


def _shape(command: Command) -> Callable[[Decision], Any]:
    return new_reply if isinstance(command, NewCommand) else _whole


def _whole(decision: Decision) -> Decision:
    return decision
