"""The routes of the index alone, as Dynamo's indexer has them, and `/ready`."""

from router.http.routes import BODY, OF_EVERY_PROCESS, Ok, Route
from router.protocol.dumps import Dump
from router.protocol.lookups import HashQueryRequest, QueryReply, QueryRequest
from router.protocol.registrations import (
    InstanceView,
    PeerRequest,
    RegisterRequest,
    UnregisterRequest,
)

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
        "Forget a registered rank, or an instance",
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
        "Note another indexer",
        Ok,
        PeerRequest,
        status=201,
        refusals=(*BODY, 503),
    ),
    Route(
        "POST",
        "/deregister_peer",
        "deregister_peer",
        "Forget another indexer",
        Ok,
        PeerRequest,
        refusals=(*BODY, 404),
    ),
    Route("GET", "/health", "health", "The process is alive; empty body", str),
    *OF_EVERY_PROCESS,
)
