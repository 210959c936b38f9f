"""HTTP of the index alone: a drop-in for Dynamo's standalone indexer."""

import time
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from router import index_views
from router.core_host import CoreHost
from router.errors import InvalidFieldError
from router.http.answers import OK
from router.http.index_openapi import INDEX_ROUTES
from router.http.web import Web, caller_of, dump_answer, json_answer, json_bytes, ready_answer
from router.index_config import IndexerConfig
from router.index_errors import SaltedHashesError
from router.instances import check_instance, is_bus, only_rank, with_rank, without_rank
from router.lookups import Lookups
from router.peers import Peers
from router.protocol.lookups import HashQueryRequest, QueryRequest
from router.protocol.registrations import (
    PeerRequest,
    RegisterRequest,
    UnregisterRequest,
    is_http_url,
)

T = TypeVar("T")


class IndexApi:
    """The handlers, on one hosted core."""

    def __init__(
        self, config: IndexerConfig, host: CoreHost, lookups: Lookups, peers: Peers
    ) -> None:
        self._config = config
        self._host = host
        self._lookups = lookups
        self._peers = peers
        self._web = Web("kv-router indexer", INDEX_ROUTES, config, host.metrics)

    def reconfigure(self, config: IndexerConfig) -> None:
        """Go on with other limits."""
        self._web.reconfigure(config)

    def app(self) -> FastAPI:
        """The application, with every route of `index_openapi.py`."""
        return self._web.app(self)

    async def query(self, request: Request) -> Response:
        """Cached prefix of a prompt."""
        body = await self._body(request, QueryRequest)
        prompt = caller_of(request).bound(body.prompt)
        return json_answer(index_views.query_reply(await self._lookups.by_tokens(prompt)))

    async def query_by_hash(self, request: Request) -> Response:
        """Cached prefix of a prompt whose blocks are hashed already."""
        body = await self._body(request, HashQueryRequest)
        if body.cache_salt is not None:
            raise SaltedHashesError("/query_by_hash")
        caller = caller_of(request)
        caller.check_group(body.scope.routing_group)
        caller.check_hashes("block_hashes")
        found = await self._lookups.by_hashes(body.scope, body.block_hashes)
        return json_answer(index_views.query_reply(found))

    async def register(self, request: Request) -> Response:
        """Add a rank that nobody announces."""
        body = await self._body(request, RegisterRequest)
        check_instance(body, has_bus=self._host.status.has_bus)
        if not is_bus(body.endpoint):
            await self._host.registrar.check(only_rank(body))
        await self._host.registrar.put(with_rank(self._host.core, body))
        return json_bytes(OK.body, 201)

    async def unregister(self, request: Request) -> Response:
        """Forget a registered rank, or an instance."""
        body = await self._body(request, UnregisterRequest)
        left = without_rank(self._host.core, body)
        if left is None:
            await self._host.registrar.remove(body.instance_id)
        else:
            await self._host.registrar.put(left)
        return json_bytes(OK.body)

    async def workers(self, _: Request) -> Response:
        """Every instance."""
        return json_answer(
            index_views.instances(self._host.core, self._host.engines.view, time.monotonic())
        )

    async def dump(self, _: Request) -> Response:
        """Everything held."""
        return await dump_answer(self._host.core)

    async def peers(self, _: Request) -> Response:
        """Other indexers."""
        return json_answer(list(self._peers))

    async def register_peer(self, request: Request) -> Response:
        """Note another indexer."""
        body = await self._body(request, PeerRequest)
        if not is_http_url(body.url):
            allowed = "http://host:port, or https://…"
            raise InvalidFieldError("url", f"{body.url!r} is no URL", allowed, status=422)
        self._peers.add(body.url)
        return json_bytes(OK.body, 201)

    async def deregister_peer(self, request: Request) -> Response:
        """Forget another indexer."""
        self._peers.remove((await self._body(request, PeerRequest)).url)
        return json_bytes(OK.body)

    async def health(self, _: Request) -> Response:
        """The process lives."""
        return Response()

    async def ready(self, _: Request) -> Response:
        """The process can be relied on."""
        return ready_answer(self._host.status, self._host.core)

    async def metrics(self, _: Request) -> Response:
        """Prometheus metrics."""
        return Response(self._host.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def _body(self, request: Request, body_type: type[T]) -> T:
        """As the router reads it, but a missing field is 422 here, as with the peer."""
        try:
            return await self._web.body(request, body_type)
        except InvalidFieldError as error:
            raise InvalidFieldError(error.field, error.reason, error.allowed, status=422) from error
