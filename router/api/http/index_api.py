"""HTTP handlers of the standalone index: a drop-in for Dynamo's standalone indexer."""

import time
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from router.api import index_queries
from router.api.errors import SaltedHashesError
from router.api.http.answers import OK
from router.api.http.routes import BODY, OF_EVERY_PROCESS, Ok, Route
from router.api.http.web import Web, dump_answer, json_answer, json_bytes
from router.api.index_instances import check_instance, is_bus, only_rank, with_rank, without_rank
from router.api.index_queries import Lookups
from router.core.core import RouterCore
from router.discovery.registration import Registrar
from router.errors import InvalidFieldError
from router.ingest.engines import Engines
from router.ingest.peer_recovery import KnownPeers
from router.observability.health import ServiceStatus
from router.observability.metrics import RouterMetrics
from router.protocol.dumps import Dump
from router.protocol.index_service import (
    HashQueryRequest,
    InstanceView,
    PeerRequest,
    QueryReply,
    QueryRequest,
    RegisterRequest,
    UnregisterRequest,
    is_http_url,
)
from router.runtime.http_server.config import BodyConfig
from router.runtime.security.guarded import caller_of

INDEX_ROUTES = (
    Route(
        "POST",
        "/query",
        "query",
        "Cached prefix of a prompt on every rank, in tokens",
        QueryReply,
        QueryRequest,
        refusals=(*BODY, 404),
    ),
    Route(
        "POST",
        "/query_by_hash",
        "query_by_hash",
        "The same, by the local hashes of the prompt's blocks",
        QueryReply,
        HashQueryRequest,
        refusals=(*BODY, 404),
    ),
    Route(
        "POST",
        "/register",
        "register",
        "Follow a rank that is not announced",
        Ok,
        RegisterRequest,
        status=201,
        refusals=(*BODY, 409, 501, 503),
    ),
    Route(
        "POST",
        "/unregister",
        "unregister",
        "Remove a registered rank, or an instance",
        Ok,
        UnregisterRequest,
        refusals=(*BODY, 404, 409),
    ),
    Route("GET", "/workers", "workers", "Every instance", list[InstanceView]),
    Route("GET", "/dump", "dump", "Every held block, as events", Dump),
    Route("GET", "/peers", "peers", "Other indexers", list[str]),
    Route(
        "POST",
        "/register_peer",
        "register_peer",
        "Add another indexer",
        Ok,
        PeerRequest,
        status=201,
        refusals=(*BODY, 503),
    ),
    Route(
        "POST",
        "/deregister_peer",
        "deregister_peer",
        "Remove another indexer",
        Ok,
        PeerRequest,
        refusals=(*BODY, 404),
    ),
    Route("GET", "/health", "health", "The process is alive; empty body", str),
    *OF_EVERY_PROCESS,
)


T = TypeVar("T")


class IndexApi:
    """The handlers, on one hosted core."""

    def __init__(
        self,
        bodies: BodyConfig,
        core: RouterCore,
        status: ServiceStatus,
        registrar: Registrar,
        engines: Engines,
        metrics: RouterMetrics,
        lookups: Lookups,
        peers: KnownPeers,
    ) -> None:
        self._core = core
        self._status = status
        self._registrar = registrar
        self._engines = engines
        self._metrics = metrics
        self._lookups = lookups
        self._peers = peers
        self._web = Web("kv-router indexer", INDEX_ROUTES, bodies, metrics)

    def reconfigure(self, bodies: BodyConfig) -> None:
        """Apply changed limits."""
        self._web.reconfigure(bodies)

    def app(self) -> FastAPI:
        """Return the application, with every route of `index_api.py`."""
        return self._web.app(self)

    async def query(self, request: Request) -> Response:
        """Return the cached prefix of a prompt on each rank."""
        body = await self._body(request, QueryRequest)
        prompt = caller_of(request.scope).bound(body.prompt)
        return json_answer(index_queries.query_reply(await self._lookups.by_tokens(prompt)))

    async def query_by_hash(self, request: Request) -> Response:
        """Return the cached prefix of a prompt given as block hashes."""
        body = await self._body(request, HashQueryRequest)
        if body.cache_salt is not None:
            raise SaltedHashesError("/query_by_hash")
        caller = caller_of(request.scope)
        caller.check_group(body.scope.routing_group)
        caller.check_hashes("block_hashes")
        found = await self._lookups.by_hashes(body.scope, body.block_hashes)
        return json_answer(index_queries.query_reply(found))

    async def register(self, request: Request) -> Response:
        """Register a rank that is not announced on a bus."""
        body = await self._body(request, RegisterRequest)
        check_instance(body, has_bus=self._status.has_bus)
        if not is_bus(body.endpoint):
            await self._registrar.check(only_rank(body))
        await self._registrar.put(with_rank(self._core, body))
        return json_bytes(OK.body, 201)

    async def unregister(self, request: Request) -> Response:
        """Remove a registered rank, or an instance."""
        body = await self._body(request, UnregisterRequest)
        left = without_rank(self._core, body)
        if left is None:
            await self._registrar.remove(body.instance_id)
        else:
            await self._registrar.put(left)
        return json_bytes(OK.body)

    async def workers(self, _: Request) -> Response:
        """List every instance."""
        return json_answer(
            index_queries.instances(self._core, self._engines.view, time.monotonic())
        )

    async def dump(self, _: Request) -> Response:
        """Return all held blocks."""
        return await dump_answer(self._core)

    async def peers(self, _: Request) -> Response:
        """List the other indexers."""
        return json_answer(list(self._peers))

    async def register_peer(self, request: Request) -> Response:
        """Add another indexer."""
        body = await self._body(request, PeerRequest)
        if not is_http_url(body.url):
            allowed = "http://host:port, or https://…"
            raise InvalidFieldError("url", f"{body.url!r} is not an HTTP URL", allowed, status=422)
        self._peers.add(body.url)
        return json_bytes(OK.body, 201)

    async def deregister_peer(self, request: Request) -> Response:
        """Remove another indexer."""
        self._peers.remove((await self._body(request, PeerRequest)).url)
        return json_bytes(OK.body)

    async def health(self, _: Request) -> Response:
        """Return 200: the process is alive."""
        return Response()

    async def metrics(self, _: Request) -> Response:
        """Return the Prometheus metrics."""
        return Response(self._metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def _body(self, request: Request, body_type: type[T]) -> T:
        """Read a body. A missing field is status 422 here, as in Dynamo's indexer."""
        try:
            return await self._web.body(request, body_type)
        except InvalidFieldError as error:
            raise InvalidFieldError(error.field, error.reason, error.allowed, status=422) from error
