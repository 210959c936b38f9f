"""NATS: the index's lookups as request and reply, in every process that has an index."""

import asyncio

import msgspec

from router.api import index_queries
from router.api.errors import AnswerTooLargeError, SaltedHashesError
from router.api.index_queries import Found, Lookups
from router.api.rpc.responder import BusResponse, Responder, headers_of
from router.core.core import RouterCore
from router.core.views import index
from router.errors import InvalidFieldError, KvRouterError
from router.indexer.dumps import IndexDump
from router.ingest.snapshots import dumped
from router.observability.metrics import RouterMetrics
from router.protocol.index_service import (
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
from router.runtime.bus.connection import Bus
from router.runtime.process.json_bodies import decode_body
from router.runtime.security.caller import Caller
from router.runtime.security.guard import Guard
from router.runtime.security.guarded import identify
from router.runtime.security.route_scopes import BUS

QUEUE_GROUP = "indexer"
UNKNOWN = "unknown"

_BLOCK_BYTES = len('{"block_hash":0,"tokens_hash":null,"mm_extra_info":null},')
"""The least size of a block in a dump."""

_SHOWN = 64
"""Characters of an unknown message quoted in the error, which must fit into a message."""


class IndexRpc:
    """A responder to index queries that the guard admits, in a queue group of all indexes."""

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
        self._answering = Responder(subject, QUEUE_GROUP, self._reply, self._refuse, metrics, limit)
        self._decoder: msgspec.json.Decoder[IndexMessage] = msgspec.json.Decoder(IndexMessage)

    async def run(self, bus: Bus) -> None:
        """Respond until cancelled or drained."""
        self._answer_limit_bytes = bus.client.max_payload
        await self._answering.run(bus)

    async def drain(self) -> None:
        """Accept no more requests, and wait for those accepted. Raises BusUnavailableError."""
        await self._answering.drain()

    async def _reply(self, sent: bytes, body: bytes) -> BusResponse:
        name = UNKNOWN
        try:
            caller = identify(self._guard, headers_of(sent))
            question = _question(await decode_body(self._decoder.decode, body))
            name = question.name
            self._guard.check_scope(caller, BUS, name)
            answer = await self._answer(question, caller, self._answer_limit_bytes)
        except KvRouterError as error:
            return self._refused(name, error)
        self._metrics.requests.count("nats", name, "ok")
        return BusResponse(answer)

    def _refuse(self, _: bytes, error: KvRouterError) -> BusResponse:
        return self._refused(UNKNOWN, error)

    def _refused(self, name: str, error: KvRouterError) -> BusResponse:
        self._metrics.refusals.labels("nats", error.code).inc()
        self._metrics.requests.count("nats", name, error.code)
        return BusResponse(msgspec.json.encode(ErrorReply(str(error))))

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
        """Return a dump of a scope. One that is too large to be sent is not built."""
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
    return msgspec.json.encode(MatchesReply(index_queries.matches(found)))


def _encoded_tree(dump: IndexDump) -> bytes:
    return msgspec.json.encode(TreeDumpReply(index.dump_events(dump)))
