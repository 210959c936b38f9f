"""The router's HTTP handlers: decode a body, call a command, encode its result.

The routes of the request path are in `hot_routes.py`.
"""

import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Receive, Scope, Send

from router.api.batches import BatchCommands
from router.api.caller_commands import CallerCommand, PotentialLoads, ReadShadow
from router.api.commands import Commands
from router.api.errors import NoReplicaPeersError, NoReplicaStreamError
from router.api.http.answers import OK, response, with_warnings_header
from router.api.http.routes import ROUTES
from router.api.http.web import Web, as_starlette, dump_answer, json_answer, json_bytes
from router.api.workers import BusyCommands, WorkerCommands
from router.core.views.accuracy import predictions
from router.core.views.capacity import capacity
from router.core.views.index import block_holders
from router.errors import ConfigError, InvalidFieldError
from router.ingest.peer_streams import PeerStreams
from router.observability.metrics import RouterMetrics
from router.observability.recording import (
    Recording,
    RecordingRequest,
    RecordingUnavailableError,
)
from router.protocol.batches import SelectBatch
from router.protocol.capacity import PoolCapacity
from router.protocol.catalogue import RouterAnnouncement
from router.protocol.replicas import PeerGreeting
from router.protocol.replies import ScopeLoads
from router.protocol.requests import (
    BusyThresholdRequest,
    PotentialLoadsRequest,
    ReplicaPeerRequest,
)
from router.protocol.values import U64_MAX, Rank, number_in
from router.protocol.workers import WorkerPatch, WorkerRequest, WorkerView
from router.runtime.http_server.config import BodyConfig
from router.runtime.process.settings import SettingView
from router.runtime.security.guard import Guard
from router.runtime.security.guarded import caller_of, is_still_admitted

V = TypeVar("V", WorkerView, ScopeLoads, PoolCapacity)


class Api:
    """The handlers, on the commands of requests and of workers.

    `routers`: lists the routers of this namespace. `settings`: the settings in effect. `recording`:
    that of this router. `streams`: those to other routers without a bus.
    """

    def __init__(
        self,
        bodies: BodyConfig,
        commands: Commands,
        workers: WorkerCommands,
        metrics: RouterMetrics,
        guard: Guard,
        routers: Callable[[], list[RouterAnnouncement]],
        settings: Mapping[str, SettingView],
        recording: Recording,
        *,
        router_id: int,
        shares_reservations: bool,
        streams: PeerStreams | None = None,
    ) -> None:
        self._web = Web("kv-router", ROUTES, bodies, metrics)
        self._router_id, self._shares = router_id, shares_reservations
        self._streams = streams
        self._commands = commands
        self._batches = BatchCommands(commands, guard, msgspec.json.Decoder)
        self._busy = BusyCommands(commands.core)
        self._workers = workers
        self._metrics = metrics
        self._routers = routers
        self._settings = settings
        self._recording = recording

    def reconfigure(self, bodies: BodyConfig) -> None:
        """Apply changed limits."""
        self._web.reconfigure(bodies)

    def app(self) -> FastAPI:
        """Return the application, with every route of `routes.py`."""
        return self._web.app(self)

    async def _reply(self, command: CallerCommand, request: Request) -> Response:
        return json_answer(await self._commands.reply_to(command, caller_of(request.scope)))

    async def select_batch(self, request: Request) -> Response:
        """Select a rank for each of several prompts."""
        batch = await self._web.body(request, SelectBatch)
        return json_answer(await self._batches.select(caller_of(request.scope), batch.requests))

    async def workers(self, request: Request) -> Response:
        """List all workers, or those of a model or a routing group."""
        return json_answer(_asked_for(self._workers.all(), request.query_params))

    async def worker(self, request: Request) -> Response:
        """Return one worker."""
        return json_answer(self._workers.view(_number_of(request, "worker_id")))

    async def register_worker(self, request: Request) -> Response:
        """Register a worker, or replace its registration."""
        body = await self._web.body(request, WorkerRequest)
        return json_answer(await self._workers.register(body), 201)

    async def patch_worker(self, request: Request) -> Response:
        """Change a registered worker; cordon, drain or uncordon any worker."""
        body = await self._web.body(request, WorkerPatch)
        return json_answer(await self._workers.patch(_number_of(request, "worker_id"), body))

    async def remove_worker(self, request: Request) -> Response:
        """Remove a registered worker."""
        return json_answer(await self._workers.remove(_number_of(request, "worker_id")))

    async def routers(self, _: Request) -> Response:
        """List the routers of this namespace."""
        return json_answer(self._routers())

    async def replica_peers(self, _: Request) -> Response:
        """List the endpoints of the routers that share reservations with this one."""
        others = [each for each in self._routers() if each.router_id != self._router_id]
        return json_answer([each.endpoint for each in others] if self._shares else [])

    async def change_replica_peers(self, request: Request) -> Response:
        """Refuse a change of peers: routers discover each other."""
        await self._web.body(request, ReplicaPeerRequest)
        raise NoReplicaPeersError

    async def replica_stream(self, request: Request) -> Response:
        """Return a stream of this router's reservations to another router."""
        greeting = await self._web.body(request, PeerGreeting)
        if self._streams is None:
            raise NoReplicaStreamError
        streams, scope = self._streams, request.scope
        stream = streams.join(greeting)

        async def records() -> AsyncIterator[bytes]:
            while (waiting := await stream.take()) and is_still_admitted(scope):
                yield waiting

        return PeerResponse(records(), partial(streams.leave, stream))

    async def busy_thresholds(self, _: Request) -> Response:
        """Return the busy thresholds, and the busy ranks."""
        return json_answer(self._busy.all())

    async def change_busy_thresholds(self, request: Request) -> Response:
        """Change the busy thresholds of a model."""
        return json_answer(self._busy.change(await self._web.body(request, BusyThresholdRequest)))

    async def config(self, _: Request) -> Response:
        """Return the settings in effect."""
        return json_answer(self._settings)

    async def recording(self, _: Request) -> Response:
        """Return the state of the recording of this router."""
        return json_answer(self._recording.view())

    async def change_recording(self, request: Request) -> Response:
        """Begin or end a recording of this router."""
        body = await self._web.body(request, RecordingRequest)
        if body.recording:
            try:
                self._recording.begin(is_midway=True)
            except ConfigError as error:
                raise RecordingUnavailableError(str(error)) from error
        else:
            await self._recording.finish()
        return json_answer(self._recording.view())

    async def loads(self, request: Request) -> Response:
        """Return the booked load, of all models and routing groups or of one."""
        return json_answer(_asked_for(self._commands.splits.loads(), request.query_params))

    async def capacity(self, request: Request) -> Response:
        """Return the demand on each pool of workers and its supply, of all or of one model."""
        pools = capacity(self._commands.core, time.monotonic())
        return json_answer(_asked_for(pools, request.query_params))

    async def potential_loads(self, request: Request) -> Response:
        """Return the load of each rank if a prompt were placed there."""
        body = await self._web.body(request, PotentialLoadsRequest)
        reply = await self._commands.reply_to(PotentialLoads(body), caller_of(request.scope))
        answer = with_warnings_header(response(reply.loads), reply.warnings)
        return as_starlette(answer)

    async def predictions(self, _: Request) -> Response:
        """Return the accuracy of predictions."""
        return json_answer(predictions(self._commands.core.closed_loop, time.monotonic()))

    async def shadow(self, request: Request) -> Response:
        """Return the differences between this router's decisions and another router's."""
        return await self._reply(ReadShadow(), request)

    async def dump(self, request: Request) -> Response:
        """Return all held blocks, or those of one rank."""
        return await dump_answer(self._commands.core, _rank_asked_for(request.query_params))

    async def block_holders(self, request: Request) -> Response:
        """Return the ranks that hold a block."""
        sequence_hash = _number_of(request, "sequence_hash")
        return json_answer(block_holders(self._commands.core, sequence_hash, time.monotonic()))

    async def health(self, _: Request) -> Response:
        """Return 200: the process is alive."""
        return json_bytes(OK.body)

    async def metrics(self, _: Request) -> Response:
        """Return the Prometheus metrics."""
        return Response(self._metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


class PeerResponse(StreamingResponse):
    """A stream to another router, which is left however it ends, also before its first byte."""

    def __init__(self, records: AsyncIterator[bytes], leave: Callable[[], None]) -> None:
        super().__init__(records, media_type="application/octet-stream")
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the records."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


def _number_of(request: Request, name: str) -> int:
    """Return a number of the path. Raises InvalidFieldError."""
    text: str = request.path_params[name]
    number = number_in(text, U64_MAX)
    if number is None:
        raise InvalidFieldError(name, f"{text[:64]!r} is no number", f"an integer, 0 to {U64_MAX}")
    return number


def _asked_for(views: list[V], query: Mapping[str, str]) -> list[V]:
    """Return the views that match the model and the routing group of a query, if given."""
    wanted = [(name, query[name]) for name in ("model_name", "routing_group") if name in query]
    return [view for view in views if all(getattr(view, n) == value for n, value in wanted)]


def _rank_asked_for(query: Mapping[str, str]) -> Rank | None:
    """Return the rank that a query names, or None. Raises InvalidFieldError."""
    named = {name: query[name] for name in ("worker_id", "dp_rank") if name in query}
    if not named:
        return None
    for name in ("worker_id", "dp_rank"):
        if not named.get(name, "").isdecimal() or len(named[name]) > 20:
            problem = repr(named[name][:64]) if name in named else "missing beside the other"
            raise InvalidFieldError(name, problem, "worker_id and dp_rank, or neither")
    return Rank(int(named["worker_id"]), int(named["dp_rank"]))
