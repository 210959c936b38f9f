"""Answers what is asked of one rank over the bus: its events, and its load.

…worker.{rank}.events ─▶ a few wait ─▶ one at a time ─▶ LocalIndex ─▶ asker, part by part
                           └ full: Refused, busy
…worker.{rank}.load   ─▶ a load report
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from router.body_errors import MalformedBodyError
from router.bus_errors import BusError
from router.errors import InvalidFieldError, KvRouterError
from router.process.bodies import decode_now
from router.protocol.loads import LoadReport, encode_load_report
from router.protocol.ranges import (
    RangeAnswer,
    RangeRequest,
    Refused,
    decode_range_request,
    encode_range_answer,
)
from router.protocol.subjects import Subjects
from router.protocol.values import Rank
from router.publisher.bus import REQUEST_TIMEOUT_S, Bus, is_inbox, subscribe, translated
from router.publisher.errors import TooManyQueriesError
from router.publisher.local_index import LocalIndex

MAX_WAITING = 8
"""Queries about a rank's events that wait for the one being answered; more are refused."""


class RankAnswers:
    """Answers about one rank; `answered`, `refused` and `undelivered` count queries.

    A dump of everything held is built and sent by one query at a time, in as many messages as it
    takes; the asker has to keep up.
    """

    def __init__(
        self, rank: Rank, local_index: LocalIndex, read_load: Callable[[], LoadReport]
    ) -> None:
        self._rank = rank
        self._local_index = local_index
        self._read_load = read_load
        self.answered = 0
        self.refused = 0
        self.undelivered = 0

    async def run(self, bus: Bus, subjects: Subjects) -> None:
        """Answer until cancelled."""
        queries = await subscribe(bus, subjects.events_wanted(self._rank))
        load_queries = await subscribe(bus, subjects.load_wanted(self._rank))
        waiting: asyncio.Queue[Msg] = asyncio.Queue(MAX_WAITING)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._admit(queries, waiting, bus))
            group.create_task(self._answer_queries(waiting, bus))
            group.create_task(self._answer_load_queries(load_queries, bus))

    async def _admit(self, queries: Subscription, waiting: asyncio.Queue[Msg], bus: Bus) -> None:
        async for message in _answerable(queries):
            if waiting.full():
                await self._refuse(bus, message, TooManyQueriesError(MAX_WAITING))
            else:
                waiting.put_nowait(message)

    async def _answer_queries(self, waiting: asyncio.Queue[Msg], bus: Bus) -> None:
        while True:
            message = await waiting.get()
            try:
                request = _request(message.data)
            except KvRouterError as error:
                await self._refuse(bus, message, error)
            else:
                await self._send_all(bus, message, self._local_index.answer(request))

    async def _answer_load_queries(self, queries: Subscription, bus: Bus) -> None:
        async for message in _answerable(queries):
            self.answered += await self._send(bus, message, encode_load_report(self._read_load()))

    async def _send_all(self, bus: Bus, message: Msg, answers: Sequence[RangeAnswer]) -> None:
        for answer in answers:
            if not await self._send(bus, message, encode_range_answer(answer)):
                return
        self.answered += 1

    async def _refuse(self, bus: Bus, message: Msg, error: KvRouterError) -> None:
        self.refused += 1
        await self._send(bus, message, encode_range_answer(_refused(error)))

    async def _send(self, bus: Bus, message: Msg, payload: bytes) -> bool:
        """Whether it was handed to the server: an answer that cannot be sent is the asker's to ask
        for again.
        """
        try:
            async with translated(message.subject), asyncio.timeout(REQUEST_TIMEOUT_S):
                await message.respond(payload)
                await bus.client.flush()
        except BusError:
            self.undelivered += 1
            return False
        return True


async def _answerable(queries: Subscription) -> AsyncIterator[Msg]:
    """Whoever names no place for the answer wants none."""
    async for message in queries.messages:
        if is_inbox(message.reply):
            yield message


def _request(payload: bytes) -> RangeRequest:
    """A checked question. Raises InvalidFieldError."""
    try:
        return decode_now(decode_range_request, payload)
    except MalformedBodyError as error:
        raise InvalidFieldError("body", error.reason, "a map, as msgpack") from error


def _refused(error: KvRouterError) -> Refused:
    if isinstance(error, InvalidFieldError):
        return Refused(str(error), error.code, error.field, error.reason, error.allowed)
    return Refused(str(error), error.code)
