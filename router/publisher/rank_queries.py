"""Responses to queries about one rank over the bus: its events, its blocks and its load.

…worker.{rank}.events ─▶ a short queue ─▶ one at a time ─▶ LocalIndex ─▶ requester, in parts
                           └ full: Refused, busy
…worker.{rank}.load   ─▶ a load report
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from router.errors import InvalidFieldError, KvRouterError
from router.protocol.loads import LoadReport, encode_load_report
from router.protocol.ranges import (
    Events,
    InvalidRange,
    RangeAnswer,
    RangeRefused,
    RangeRequest,
    TooNew,
    decode_range_request,
    encode_range_answer,
)
from router.protocol.subjects import Subjects
from router.protocol.values import Rank
from router.publisher.errors import TooManyQueriesError
from router.publisher.journal.journal import EventJournal
from router.runtime.bus.connection import REQUEST_TIMEOUT_S, Bus, is_inbox, subscribe, translated
from router.runtime.bus.errors import BusError
from router.runtime.process.errors import MalformedBodyError
from router.runtime.process.json_bodies import decode_now


class LocalIndex:
    """A responder to queries about one rank, from its journal's current state.

    Responding seals the events: what a response states about ids is the same as in a later batch
    or checkpoint.
    """

    __slots__ = ("_journal",)

    def __init__(self, journal: EventJournal) -> None:
        self._journal = journal

    def answer(self, request: RangeRequest) -> Sequence[RangeAnswer]:
        """Return the response: events if all from the start on are known, else a checkpoint.

        A checkpoint may have several parts. O(bytes of the response).
        """
        start, end = request.start_event_id, request.end_event_id
        if start is not None and end is not None and end < start:
            return [InvalidRange(start, end)]
        self._journal.seal()
        recent = self._journal.recent
        if start is None or not recent or start < recent.first_event_id:
            return self._journal.dump()
        if start > recent.last_event_id:
            return [TooNew(self._journal.incarnation, start, end, recent.last_event_id)]
        newest = recent.last_event_id
        return [self._events(start, newest if end is None else min(end, newest))]

    def _events(self, first: int, last: int) -> Events:
        journal = self._journal
        packed = journal.recent.packed(first, last)
        return Events(journal.incarnation, journal.identity, first, last, packed)


MAX_WAITING = 8
"""The limit of queries about a rank's events that wait while one is processed; more are refused."""


class RankQueryResponder:
    """A responder to queries about one rank.

    `answered`, `refused` and `undelivered` count queries. Dumps of the held blocks are built and
    sent for one query at a time, in as many messages as needed; the requester must keep up.
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
        """Respond to queries until cancelled."""
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
        """Send a response. Returns whether it was handed to the server.

        A response that cannot be sent is dropped; the requester has to repeat its request.
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
    """Yield the queries that have a reply subject; the others want no response."""
    async for message in queries.messages:
        if is_inbox(message.reply):
            yield message


def _request(payload: bytes) -> RangeRequest:
    """Return a checked request. Raises InvalidFieldError."""
    try:
        return decode_now(decode_range_request, payload)
    except MalformedBodyError as error:
        raise InvalidFieldError("body", error.reason, "a map, as msgpack") from error


def _refused(error: KvRouterError) -> RangeRefused:
    if isinstance(error, InvalidFieldError):
        return RangeRefused(str(error), error.code, error.field, error.reason, error.allowed)
    return RangeRefused(str(error), error.code)
