"""NATS: the index's lookups as request and reply, wherever an index is kept."""

import asyncio

import msgspec
from nats.aio.msg import Msg

from router import dump_views, index_views
from router.answering import Answering, BusAnswer
from router.core import RouterCore
from router.dumping import dumped
from router.errors import InvalidFieldError, KvRouterError
from router.index_errors import AnswerTooLargeError, SaltedHashesError
from router.indexer.dumps import IndexDump
from router.lookups import Found, Lookups
from router.metrics import RouterMetrics
from router.process.bodies import decode_body
from router.protocol.lookups import (
    QUESTIONS,
    ErrorReply,
    HashedLookup,
    IndexMessage,
    IndexQuestion,
    IndexQuestions,
    MatchesReply,
    TokensLookup,
    TreeDumpReply,
    TreeLookup,
)
from router.protocol.subjects import Subjects
from router.protocol.values import Scope
from router.publisher.bus import Bus
from router.security.caller import Caller
from router.security.guard import Guard
from router.security.guarded import identify
from router.security.route_scopes import BUS

QUEUE_GROUP = "indexer"
UNKNOWN = "unknown"

_BLOCK_BYTES = len('{"block_hash":0,"tokens_hash":null,"mm_extra_info":null},')
"""The least that a block takes in a dump."""

_SHOWN = 64
"""Characters of what nobody knows that are said back: an answer must fit into a message."""


class IndexRpc:
    """Answers index queries that the guard admits, in a queue group with all others who keep an
    index.
    """

    def __init__(
        self,
        core: RouterCore,
        lookups: Lookups,
        metrics: RouterMetrics,
        subjects: Subjects,
        guard: Guard,
        limit: int,
    ) -> None:
        self._core = core
        self._guard = guard
        self._lookups = lookups
        self._metrics = metrics
        self._answer_limit_bytes = 0
        subject = subjects.index_queries
        self._answering = Answering(subject, QUEUE_GROUP, self._reply, self._refuse, metrics, limit)
        self._decoder: msgspec.json.Decoder[IndexMessage] = msgspec.json.Decoder(IndexMessage)

    async def run(self, bus: Bus) -> None:
        """Answer until cancelled, or drained."""
        self._answer_limit_bytes = bus.client.max_payload
        await self._answering.run(bus)

    async def drain(self) -> None:
        """Take no more, and wait until what was taken is answered. Raises BusUnavailableError."""
        await self._answering.drain()

    async def _reply(self, message: Msg) -> BusAnswer:
        name = UNKNOWN
        try:
            caller = identify(self._guard, message.headers)
            question = _question(await decode_body(self._decoder.decode, message.data))
            name = question.name
            self._guard.check_scope(caller, BUS, name)
            answer = await self._answer(question, caller, self._answer_limit_bytes)
        except KvRouterError as error:
            return self._refused(name, error)
        self._metrics.requests.count("nats", name, "ok")
        return BusAnswer(answer)

    def _refuse(self, _: Msg, error: KvRouterError) -> BusAnswer:
        return self._refused(UNKNOWN, error)

    def _refused(self, name: str, error: KvRouterError) -> BusAnswer:
        self._metrics.refusals.labels("nats", error.code).inc()
        self._metrics.requests.count("nats", name, error.code)
        return BusAnswer(msgspec.json.encode(ErrorReply(str(error))))

    async def _answer(self, question: IndexQuestion, caller: Caller, limit_bytes: int) -> bytes:
        match question:
            case TokensLookup():
                prompt = caller.bound(question.prompt)
                answer = _matches(await self._lookups.by_tokens(prompt))
            case HashedLookup():
                answer = _matches(await self._by_hashes(question, caller))
            case TreeLookup():
                answer = await self._tree(question.scope, limit_bytes)
        if len(answer) > limit_bytes:
            raise AnswerTooLargeError(limit_bytes)
        return answer

    async def _by_hashes(self, question: HashedLookup, caller: Caller) -> Found:
        if question.cache_salt is not None:
            raise SaltedHashesError(question.name)
        caller.check_group(question.scope.routing_group)
        caller.check_hashes("block_hashes")
        return await self._lookups.by_hashes(question.scope, question.block_hashes)

    async def _tree(self, scope: Scope, limit_bytes: int) -> bytes:
        """What can not be sent is not built."""
        self._lookups.workers(scope)
        dump = await dumped(self._core, scope)
        if sum(len(part.rows) for _, part in dump.slices) * _BLOCK_BYTES > limit_bytes:
            raise AnswerTooLargeError(limit_bytes)
        return await asyncio.to_thread(_encoded_tree, dump)


def _question(message: IndexMessage) -> IndexQuestion:
    if isinstance(message, IndexQuestions):
        return message.question
    if message != TreeLookup.name:
        raise InvalidFieldError("body", f"got {message[:_SHOWN]!r}", f"one of {QUESTIONS}")
    return TreeLookup()


def _matches(found: Found) -> bytes:
    return msgspec.json.encode(MatchesReply(index_views.matches(found)))


def _encoded_tree(dump: IndexDump) -> bytes:
    return msgspec.json.encode(TreeDumpReply(dump_views.dump_events(dump)))
