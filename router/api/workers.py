"""Commands about workers: registration, orders of operators, and the models' busy thresholds."""

import time
from collections.abc import Awaitable, Callable

from msgspec import UNSET, Struct, structs

from router.core.commands import SetBusyThresholds
from router.core.core import RouterCore
from router.core.registered_workers import missing
from router.core.registrations import Registrations
from router.core.views import workers
from router.discovery.attach.attachments import Attachments
from router.discovery.registration import Registrar
from router.errors import WorkerNotFoundError
from router.protocol.catalogue import Lifecycle
from router.protocol.requests import BusyThresholdRequest
from router.protocol.workers import WorkerPatch, WorkerRegistration, WorkerRequest, WorkerView
from router.scheduler.busy import BusyThresholds


class BusyRank(Struct, frozen=True):
    """A busy rank, which gets no requests for now."""

    worker_id: int
    dp_rank: int
    routing_group: str


class ModelThresholds(Struct, frozen=True, kw_only=True):
    """The thresholds of a model, null for those not in use, and its busy ranks."""

    model: str
    active_decode_blocks_threshold: float | None
    active_prefill_tokens_threshold: int | None
    active_prefill_tokens_threshold_frac: float | None
    busy: list[BusyRank]


class BusyThresholdsReply(Struct, frozen=True):
    """The thresholds of each model that is served, or has thresholds of its own."""

    thresholds: list[ModelThresholds]


class BusyCommands:
    """Commands about thresholds, on one core. Changes last as long as the process."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core

    def all(self) -> BusyThresholdsReply:
        """Return the thresholds of every model. O(ranks)."""
        served = {worker.announcement.model_name for worker in self._core.fleet}
        models = sorted(served | set(self._core.gate.models))
        return BusyThresholdsReply([self._of(model) for model in models])

    def change(self, request: BusyThresholdRequest) -> ModelThresholds:
        """Set the thresholds that the request names, and return those of its model.

        Null removes a threshold; a threshold that is not named stays as it is.
        """
        named = {
            name: getattr(request, name)
            for name in BusyThresholds.__struct_fields__
            if getattr(request, name) is not UNSET
        }
        if named:
            before = self._core.gate.thresholds(request.model)
            self._core.handle(
                SetBusyThresholds(request.model, structs.replace(before, **named)), 0.0
            )
        return self._of(request.model)

    def _of(self, model: str) -> ModelThresholds:
        thresholds = self._core.gate.thresholds(model)
        return ModelThresholds(model=model, busy=self._busy(model), **structs.asdict(thresholds))

    def _busy(self, model: str) -> list[BusyRank]:
        announced = (worker.announcement for worker in self._core.fleet)
        scopes = sorted({each.scope for each in announced if each.model_name == model})
        return [
            BusyRank(rank.worker_id, rank.dp_rank, scope.routing_group)
            for scope in scopes
            for rank in self._core.busy_ranks(scope)
        ]


class WorkerCommands:
    """Commands on one core's workers. `order` stores and applies an operator's command."""

    def __init__(
        self,
        core: RouterCore,
        registrations: Registrations,
        registrar: Registrar,
        engine_of: workers.EngineOf,
        attachments: Attachments,
        order: Callable[[int, Lifecycle], Awaitable[None]],
    ) -> None:
        self._core = core
        self._registrations = registrations
        self._registrar = registrar
        self._engine_of = engine_of
        self._attachments = attachments
        self._order = order

    def all(self) -> list[WorkerView]:
        """Return all workers, by id."""
        whole = workers.workers(self._core, time.monotonic(), self._engine_of)
        incomplete = [self._incomplete_view(each) for each in self._registrations.incomplete]
        views = [self._with_sentence(each) for each in (*whole, *incomplete)]
        return sorted(views, key=lambda view: view.worker_id)

    def view(self, worker_id: int) -> WorkerView:
        """Return one worker. Raises WorkerNotFoundError."""
        worker = self._core.fleet.get(worker_id)
        if worker is not None:
            view = workers.worker_view(self._core, worker, time.monotonic(), self._engine_of)
            return self._with_sentence(view)
        for registration in self._registrations.incomplete:
            if registration.worker_id == worker_id:
                return self._with_sentence(self._incomplete_view(registration))
        raise WorkerNotFoundError(worker_id)

    async def register(self, request: WorkerRequest) -> WorkerView:
        """Add a worker, replace its registration, or attach an engine by its URL.

        Raises InvalidFieldError, and what `Registrar` raises.
        """
        if request.url is not None:
            return self.view(await self._attachments.attach(request.url))
        registration = request.registration
        await self._registrar.check(registration)
        await self._registrar.put(registration)
        return self.view(registration.worker_id)

    async def patch(self, worker_id: int, patch: WorkerPatch) -> WorkerView:
        """Change a registered worker, or set the lifecycle of any worker.

        Raises WorkerNotFoundError, AnnouncedWorkerError, and what `Registrar` raises.
        """
        self.view(worker_id)
        if patch.given:
            await self._registrar.check(self._registrations.get(worker_id).patched(patch))
            await self._registrar.put(self._registrations.get(worker_id).patched(patch))
        if patch.lifecycle is not None:
            await self._order(worker_id, patch.lifecycle)
        return self.view(worker_id)

    async def remove(self, worker_id: int) -> WorkerView:
        """Remove a registered worker, and return its last state.

        Raises WorkerNotFoundError, AnnouncedWorkerError, DataDirError.
        """
        before = self.view(worker_id)
        await self._registrar.remove(worker_id)
        return structs.replace(before, lifecycle="unschedulable")

    def _with_sentence(self, view: WorkerView) -> WorkerView:
        """Return the view of a worker with what is known of its engine, if that was attached."""
        sentence = self._attachments.sentences.get(view.worker_id)
        if sentence is None:
            return view
        is_incomplete = view.lifecycle == "incomplete"
        reasons = [sentence] if is_incomplete else view.not_schedulable_reasons
        return structs.replace(view, attachment=sentence, not_schedulable_reasons=reasons)

    def _incomplete_view(self, registration: WorkerRegistration) -> WorkerView:
        lacking = missing(registration)
        return workers.incomplete_view(registration, lacking)
