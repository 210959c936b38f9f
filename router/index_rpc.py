"""NATS: the index's lookups as request and reply, wherever an index is kept."""

import asyncio

import msgspec
from nats.aio.msg import Msg

from router import index_views, views
from router.answering import answer_requests
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

QUEUE_GROUP = "indexer"

_BLOCK_BYTES = len('{"block_hash":0,"tokens_hash":null,"mm_extra_info":null},')
"""The least that a block takes in a dump."""

_SHOWN = 64
"""Characters of what nobody knows that are said back: an answer must fit into a message."""


class IndexRpc:
    """Answers index queries, in a queue group with all others who keep an index."""

    def __init__(
        self, core: RouterCore, lookups: Lookups, metrics: RouterMetrics, subjects: Subjects
    ) -> None:
        self._core = core
        self._lookups = lookups
        self._metrics = metrics
        self._subjects = subjects
        self._decoder: msgspec.json.Decoder[IndexMessage] = msgspec.json.Decoder(IndexMessage)

    async def run(self, bus: Bus) -> None:
        """Answer until cancelled."""

        async def reply(message: Msg) -> bytes:
            return await self._reply(message.data, bus.client.max_payload)

        subject = self._subjects.index_queries
        await answer_requests(bus, subject, QUEUE_GROUP, reply, self._metrics)

    async def _reply(self, payload: bytes, limit_bytes: int) -> bytes:
        question_name = "unknown"
        try:
            question = _question(await decode_body(self._decoder.decode, payload))
            question_name = question.name
            answer = await self._answer(question, limit_bytes)
            code = "ok"
        except KvRouterError as error:
            self._metrics.refusals.labels("nats", error.code).inc()
            answer = msgspec.json.encode(ErrorReply(str(error)))
            code = error.code
        self._metrics.requests.labels("nats", question_name, code).inc()
        return answer

    async def _answer(self, question: IndexQuestion, limit_bytes: int) -> bytes:
        match question:
            case TokensLookup():
                answer = _matches(await self._lookups.by_tokens(question.prompt))
            case HashedLookup():
                answer = _matches(await self._by_hashes(question))
            case TreeLookup():
                answer = await self._tree(question.scope, limit_bytes)
        if len(answer) > limit_bytes:
            raise AnswerTooLargeError(limit_bytes)
        return answer

    async def _by_hashes(self, question: HashedLookup) -> Found:
        if question.cache_salt is not None:
            raise SaltedHashesError(question.name)
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
    return msgspec.json.encode(TreeDumpReply(views.dump_events(dump)))
