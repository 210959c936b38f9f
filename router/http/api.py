"""HTTP: handlers read bytes, call a command, and encode what it answers. What every request goes
through is in `hot.py`.
"""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from router import rank_views
from router.batches import BatchCommands
from router.block_views import block_holders
from router.busy_commands import BusyCommands
from router.commands import Commands
from router.config import RouterConfig
from router.errors import InvalidFieldError, NoReplicaPeersError
from router.http.answers import OK
from router.http.routes import ROUTES
from router.http.web import Web, caller_of, dump_answer, json_answer, json_bytes, ready_answer
from router.metrics import RouterMetrics
from router.prediction_views import predictions, public_findings
from router.process.effective import SettingView
from router.protocol.batches import SelectBatch
from router.protocol.catalogue import RouterAnnouncement
from router.protocol.replies import ScopeLoads
from router.protocol.requests import BusyThresholdRequest, PromptRequest, ReplicaPeerRequest
from router.protocol.values import U64_MAX, Rank
from router.protocol.workers import WorkerPatch, WorkerRegistration
from router.security.guard import Guard
from router.status import ServiceStatus
from router.tenant_commands import commands_of
from router.worker_commands import WorkerCommands
from router.worker_views import WorkerView

V = TypeVar("V", WorkerView, ScopeLoads)


class Api:
    """The handlers, on two sets of commands. `routers` lists who serves this namespace; `settings`
    are those in effect.
    """

    def __init__(
        self,
        config: RouterConfig,
        commands: Commands,
        workers: WorkerCommands,
        status: ServiceStatus,
        metrics: RouterMetrics,
        guard: Guard,
        routers: Callable[[], list[RouterAnnouncement]],
        settings: Mapping[str, SettingView],
    ) -> None:
        self._web = Web("kv-router", ROUTES, config, metrics)
        self._router_id, self._shares = config.router_id, config.shares_reservations
        self._commands = commands
        self._batches = BatchCommands(commands, guard, msgspec.json.Decoder)
        self._busy = BusyCommands(commands.core)
        self._workers = workers
        self._status = status
        self._metrics = metrics
        self._routers = routers
        self._settings = settings

    def reconfigure(self, config: RouterConfig) -> None:
        """Go on with other limits."""
        self._web.reconfigure(config)

    def app(self) -> FastAPI:
        """The application, with every route of `routes.py`."""
        return self._web.app(self)

    def _commands_of(self, request: Request) -> Commands:
        return commands_of(self._commands, caller_of(request))

    async def select_batch(self, request: Request) -> Response:
        """Choose a rank for each of many prompts."""
        batch = await self._web.body(request, SelectBatch)
        return json_answer(await self._batches.select(caller_of(request), batch.requests))

    async def workers(self, request: Request) -> Response:
        """Every worker, or those of a model, or a group."""
        return json_answer(_asked_for(self._workers.all(), request.query_params))

    async def worker(self, request: Request) -> Response:
        """One worker."""
        return json_answer(self._workers.view(_number_of(request, "worker_id")))

    async def register_worker(self, request: Request) -> Response:
        """Add a worker, or say anew what it is."""
        body = await self._web.body(request, WorkerRegistration)
        return json_answer(await self._workers.register(body), 201)

    async def patch_worker(self, request: Request) -> Response:
        """Change a registered worker; cordon any, drain it, or let it serve again."""
        body = await self._web.body(request, WorkerPatch)
        return json_answer(await self._workers.patch(_number_of(request, "worker_id"), body))

    async def remove_worker(self, request: Request) -> Response:
        """Forget a registered worker."""
        return json_answer(await self._workers.remove(_number_of(request, "worker_id")))

    async def routers(self, _: Request) -> Response:
        """Routers of this namespace."""
        return json_answer(self._routers())

    async def replica_peers(self, _: Request) -> Response:
        """Where other routers are that share reservations with this one."""
        others = [each for each in self._routers() if each.router_id != self._router_id]
        return json_answer([each.endpoint for each in others] if self._shares else [])

    async def change_replica_peers(self, request: Request) -> Response:
        """Refused: routers find each other."""
        await self._web.body(request, ReplicaPeerRequest)
        raise NoReplicaPeersError

    async def busy_thresholds(self, _: Request) -> Response:
        """Above what ranks are busy, and who is."""
        return json_answer(self._busy.all())

    async def change_busy_thresholds(self, request: Request) -> Response:
        """Change the thresholds of a model."""
        return json_answer(self._busy.change(await self._web.body(request, BusyThresholdRequest)))

    async def config(self, _: Request) -> Response:
        """The settings in effect."""
        return json_answer(self._settings)

    async def loads(self, request: Request) -> Response:
        """Booked load, or that of a model, or a group."""
        return json_answer(_asked_for(rank_views.loads(self._commands.core), request.query_params))

    async def potential_loads(self, request: Request) -> Response:
        """Load, were a prompt placed."""
        body = await self._web.body(request, PromptRequest)
        return json_answer(await self._commands_of(request).potential_loads(body))

    async def overlap_scores(self, request: Request) -> Response:
        """Cached prefix of a prompt."""
        body = await self._web.body(request, PromptRequest)
        return json_answer(await self._commands_of(request).overlap_scores(body))

    async def predictions(self, _: Request) -> Response:
        """How well predictions are met."""
        return json_answer(predictions(self._commands.core.closed_loop, time.monotonic()))

    async def shadow(self, request: Request) -> Response:
        """How our choices would have differed."""
        return json_answer(self._commands_of(request).shadow_report())

    async def dump(self, request: Request) -> Response:
        """Everything held, or what one rank holds."""
        return await dump_answer(self._commands.core, _rank_asked_for(request.query_params))

    async def block_holders(self, request: Request) -> Response:
        """Who holds a block."""
        sequence_hash = _number_of(request, "sequence_hash")
        return json_answer(block_holders(self._commands.core, sequence_hash, time.monotonic()))

    async def health(self, _: Request) -> Response:
        """The process lives."""
        return json_bytes(OK.body)

    async def ready(self, _: Request) -> Response:
        """The process can be relied on."""
        core = self._commands.core
        found = public_findings(core.closed_loop, time.monotonic())
        return ready_answer(self._status, core, self._workers.all(), found)

    async def metrics(self, _: Request) -> Response:
        """Prometheus metrics."""
        return Response(self._metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


def _number_of(request: Request, name: str) -> int:
    """A number of the path. Raises InvalidFieldError."""
    text: str = request.path_params[name]
    if not (text.isascii() and text.isdecimal() and len(text) <= 20 and int(text) <= U64_MAX):
        raise InvalidFieldError(name, f"{text[:64]!r} is none", f"an integer, 0 to {U64_MAX}")
    return int(text)


def _asked_for(views: list[V], query: Mapping[str, str]) -> list[V]:
    """Those of the model and the group that a query names, if it does."""
    wanted = [(name, query[name]) for name in ("model_name", "routing_group") if name in query]
    return [view for view in views if all(getattr(view, n) == value for n, value in wanted)]


def _rank_asked_for(query: Mapping[str, str]) -> Rank | None:
    """The rank that a query names. Raises InvalidFieldError."""
    named = {name: query[name] for name in ("worker_id", "dp_rank") if name in query}
    if not named:
        return None
    for name in ("worker_id", "dp_rank"):
        if not named.get(name, "").isdecimal() or len(named[name]) > 20:
            problem = repr(named[name][:64]) if name in named else "missing beside the other"
            raise InvalidFieldError(name, problem, "worker_id and dp_rank, or neither")
    return Rank(int(named["worker_id"]), int(named["dp_rank"]))
