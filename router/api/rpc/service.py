"""Commands over NATS, the same as over HTTP, as request and reply.

message ─▶ headers, caller, size ─▶ command, by its `method` ─▶ the caller's commands ─▶ reply
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from inspect import iscoroutine
from typing import Any

from router.api.batches import BatchCommands
from router.api.commands import Commands, PendingRequest
from router.api.errors import AnswerTooLargeError
from router.api.rpc.call import RpcHeads, RpcRequest
from router.api.rpc.codecs import JSON, MSGPACK
from router.api.rpc.responder import BusResponse, Responder, Waiting, Work
from router.api.rpc.verbs import Verbs
from router.core.commands import Free
from router.errors import KvRouterError
from router.observability.metrics import RouterMetrics
from router.protocol.commands import Command
from router.protocol.subjects import Subjects
from router.runtime.bus.connection import Bus
from router.runtime.http_server.config import BodyConfig
from router.runtime.process.errors import BodyTooLargeError
from router.runtime.process.json_bodies import THREAD_BYTES
from router.runtime.process.request_ids import ANSWERED
from router.runtime.security.caller import ANYBODY
from router.runtime.security.guard import Guard
from router.runtime.security.guarded import identify
from router.runtime.security.route_scopes import BUS

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
        self._verbs = {
            codec: Verbs(commands, BatchCommands(commands, guard, codec.decoder))
            for codec in (JSON, MSGPACK)
        }
        self._heads = RpcHeads()
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

    def _answer(self, sent: bytes, body: bytes) -> BusResponse | Waiting | Work:
        call = self._heads.request(sent)
        head = call.head
        before = ANSWERED.set(call.ids)
        try:
            if head.problem is not None:
                raise head.problem
            call.caller = identify(self._guard, head.headers)
            if len(body) > self._body_limit_bytes:
                raise BodyTooLargeError(self._body_limit_bytes)
            if len(body) > THREAD_BYTES:
                return self._read_later(call, body)
            return self._executed(call, head.codec.decode(body, call.unknown))
        except KvRouterError as error:
            return self._refused(call, error)
        finally:
            ANSWERED.reset(before)

    def _executed(self, call: RpcRequest, command: Command) -> BusResponse | Waiting | Work:
        """Return the response to a command, or the work that remains until there is one."""
        verb = self._verbs[call.head.codec].of[type(command)]
        call.method, call.shape = verb.name, verb.shape
        if call.caller is not ANYBODY:
            self._guard.check_scope(call.caller, BUS, verb.name)
        reply = verb.act(command, call.caller, call.fields)
        if isinstance(reply, PendingRequest):
            return Waiting(call.waiting_inbox, self._placed(call, reply))
        return self._later(call, reply) if iscoroutine(reply) else self._answered(call, reply)

    # Waiting coroutines keep no request and no body: tokens of a long queue would fill memory.

    async def _read_later(self, call: RpcRequest, body: bytes) -> BusResponse | Waiting:
        """Respond to a long body, which is read on another thread."""
        ANSWERED.set(call.ids)
        try:
            reading = asyncio.to_thread(call.head.codec.decode, body, call.unknown)
            del body
            answer = self._executed(call, await call.in_time(reading))
        except KvRouterError as error:
            return self._refused(call, error)
        return answer if isinstance(answer, BusResponse | Waiting) else await answer

    async def _later(
        self, call: RpcRequest, work: Coroutine[Any, Any, Any]
    ) -> BusResponse | Waiting:
        ANSWERED.set(call.ids)
        try:
            reply = await call.in_time(work)
        except KvRouterError as error:
            return self._refused(call, error)
        if isinstance(reply, PendingRequest):
            return Waiting(call.waiting_inbox, self._placed(call, reply))
        return self._answered(call, reply)

    async def _placed(self, call: RpcRequest, wait: PendingRequest) -> BusResponse:
        """Wait for a queued request, which is withdrawn at its caller's timeout."""
        ANSWERED.set(call.ids)
        try:
            decision = await call.in_time(self._commands.decision(wait, call.caller))
        except KvRouterError as error:
            return self._refused(call, error)
        return self._answered(call, decision)

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

    def _refuse(self, sent: bytes, error: KvRouterError) -> BusResponse:
        """Return an error for a request that is not processed."""
        call = self._heads.request(sent)
        return self._refused(call, call.head.problem or error)

    def _refused(self, call: RpcRequest, error: KvRouterError) -> BusResponse:
        is_ours = error.http_status == 500
        log.log(logging.ERROR if is_ours else logging.DEBUG, "refused (%s): %s", error.code, error)
        self._metrics.refusals.labels("nats", error.code).inc()
        self._metrics.requests.count("nats", call.method, error.code)
        return call.refused(error)
