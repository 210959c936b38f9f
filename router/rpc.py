"""NATS: the same commands as over HTTP, as request and reply, tagged by `method`."""

from collections.abc import Callable

import msgspec
from nats.aio.msg import Msg

from router.answering import Later, answer_requests
from router.commands import REQUEST_ID_HEADER, Commands, Wait, asked_with, request_id_of
from router.errors import KvRouterError, MissingRequestIdError, ReservationNotFoundError
from router.metrics import RouterMetrics
from router.process.bodies import decode_body
from router.protocol.replies import (
    Decision,
    FreeMarkedReply,
    NewReply,
    PotentialLoadsReply,
    PrefillMarkedReply,
    Reply,
)
from router.protocol.requests import (
    Command,
    MarkFreeCommand,
    MarkPrefillCommand,
    NewCommand,
    PotentialLoadsCommand,
)
from router.protocol.subjects import Subjects
from router.publisher.bus import Bus

QUEUE_GROUP = "router"


class Rpc:
    """Answers commands on the router's subject, in a queue group with the other routers."""

    def __init__(self, commands: Commands, metrics: RouterMetrics, subjects: Subjects) -> None:
        self._commands = commands
        self._metrics = metrics
        self._subjects = subjects
        self._decoder: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)

    async def run(self, bus: Bus) -> None:
        """Answer until cancelled."""
        await answer_requests(bus, self._subjects.router, QUEUE_GROUP, self._reply, self._metrics)

    async def _reply(self, message: Msg) -> bytes | Later:
        method = "unknown"
        try:
            command = await decode_body(self._decoder.decode, message.data)
            method = str(command.__struct_config__.tag)
            answer = await self._answer(command, message)
        except KvRouterError as error:
            return self._refused(method, error)
        if isinstance(answer, Wait):
            return self._later(method, answer)
        return self._answered(method, answer)

    async def _later(self, method: str, wait: Wait) -> bytes:
        try:
            return self._answered(method, _new_reply(await self._commands.decision(wait)))
        except KvRouterError as error:
            return self._refused(method, error)

    def _answered(self, method: str, answer: Reply) -> bytes:
        self._metrics.requests.labels("nats", method, "ok").inc()
        return msgspec.json.encode(answer)

    def _refused(self, method: str, error: KvRouterError) -> bytes:
        self._metrics.refusals.labels("nats", error.code).inc()
        self._metrics.requests.labels("nats", method, error.code).inc()
        return msgspec.json.encode({"method": "error", **error.body()})

    async def _answer(self, command: Command, message: Msg) -> Reply | Wait:
        match command:
            case NewCommand():
                return await self._new(command, message)
            case MarkPrefillCommand(request_id):
                return PrefillMarkedReply(
                    _marked(self._commands.prefill_complete, request_id, message)
                )
            case MarkFreeCommand(request_id):
                return FreeMarkedReply(_marked(self._commands.free, request_id, message))
            case PotentialLoadsCommand():
                return PotentialLoadsReply(
                    await self._commands.potential_loads(command),
                    *self._commands.core.waiting.usage(command.scope),
                )

    async def _new(self, command: NewCommand, message: Msg) -> NewReply | Wait:
        asked = asked_with(command, message.headers or {})
        if asked.request_id is None:
            raise MissingRequestIdError
        submitted = await self._commands.submit(asked)
        return submitted if isinstance(submitted, Wait) else _new_reply(submitted)


def _new_reply(decision: Decision) -> NewReply:
    return NewReply(
        request_id=decision.request_id or "",
        worker_id=decision.worker_id,
        dp_rank=decision.dp_rank,
        overlap_blocks=decision.overlap_blocks,
        predicted_cached_blocks=decision.predicted_cached_blocks,
        endpoint=decision.endpoint,
    )


def _marked(mark: Callable[[str], None], request_id: str | None, message: Msg) -> bool:
    try:
        mark(_id(request_id, message))
    except ReservationNotFoundError:
        return False
    return True


def _id(request_id: str | None, message: Msg) -> str:
    found = request_id_of(request_id, (message.headers or {}).get(REQUEST_ID_HEADER))
    if found is None:
        raise MissingRequestIdError
    return found
