"""What callers ask and order about workers, announced and registered alike."""

import time
from collections.abc import Awaitable, Callable

from msgspec import structs

from router import worker_views
from router.core import RouterCore
from router.errors import WorkerNotFoundError
from router.protocol.catalogue import Lifecycle
from router.protocol.workers import WorkerPatch, WorkerRegistration
from router.registrar import Registrar
from router.registrations import Registrations, missing


class WorkerCommands:
    """Commands on one core's workers. `order` has an operator's order kept and obeyed."""

    def __init__(
        self,
        core: RouterCore,
        registrations: Registrations,
        registrar: Registrar,
        engine_of: worker_views.EngineOf,
        order: Callable[[int, Lifecycle], Awaitable[None]],
    ) -> None:
        self._core = core
        self._registrations = registrations
        self._registrar = registrar
        self._engine_of = engine_of
        self._order = order

    def all(self) -> list[worker_views.WorkerView]:
        """Every worker, by id."""
        whole = worker_views.workers(self._core, time.monotonic(), self._engine_of)
        incomplete = [self._incomplete_view(each) for each in self._registrations.incomplete]
        return sorted([*whole, *incomplete], key=lambda view: view.worker_id)

    def view(self, worker_id: int) -> worker_views.WorkerView:
        """One worker. Raises WorkerNotFoundError."""
        worker = self._core.fleet.get(worker_id)
        if worker is not None:
            return worker_views.worker_view(self._core, worker, time.monotonic(), self._engine_of)
        for registration in self._registrations.incomplete:
            if registration.worker_id == worker_id:
                return self._incomplete_view(registration)
        raise WorkerNotFoundError(worker_id)

    async def register(self, registration: WorkerRegistration) -> worker_views.WorkerView:
        """Add a worker, or say anew what it is. Raises what `Registrar` raises."""
        await self._registrar.check(registration)
        await self._registrar.put(registration)
        return self.view(registration.worker_id)

    async def patch(self, worker_id: int, patch: WorkerPatch) -> worker_views.WorkerView:
        """Change a registered worker; give an order about any. Raises WorkerNotFoundError,
        AnnouncedWorkerError, and what `Registrar` raises.
        """
        self.view(worker_id)
        if patch.said:
            await self._registrar.check(self._registrations.get(worker_id).patched(patch))
            await self._registrar.put(self._registrations.get(worker_id).patched(patch))
        if patch.lifecycle is not None:
            await self._order(worker_id, patch.lifecycle)
        return self.view(worker_id)

    async def remove(self, worker_id: int) -> worker_views.WorkerView:
        """Forget a registered worker; how it stood. Raises WorkerNotFoundError,
        AnnouncedWorkerError, DataDirError.
        """
        before = self.view(worker_id)
        await self._registrar.remove(worker_id)
        return structs.replace(before, lifecycle="unschedulable")

    def _incomplete_view(self, registration: WorkerRegistration) -> worker_views.WorkerView:
        lacking = missing(registration, needs_events=self._core.reads_events)
        return worker_views.incomplete_view(registration, lacking)
