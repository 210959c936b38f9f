"""Registering workers, whoever asks for it: checked, in the core, followed, and kept.

put ─ check_endpoints ─▶ Registrations ─▶ Engines.settle ─▶ data folder ─▶ answer
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TypeAlias

from router.core import RouterCore
from router.data_dir import DataDir, Kept
from router.engine_endpoints import check_endpoints
from router.engines import Engines
from router.errors import KvRouterError
from router.outbox import Outbox
from router.protocol.catalogue import Lifecycle
from router.protocol.workers import WorkerRegistration
from router.registrations import RegisteredWorker, Registrations

log = logging.getLogger(__name__)

MakeWorker: TypeAlias = Callable[[WorkerRegistration, int], RegisteredWorker | None]
"""A registration and an incarnation, as the core takes it; None if something is missing."""


class Registrar:
    """Changes to registered workers. `keeps_orders`: there is no bus that keeps them."""

    def __init__(
        self,
        core: RouterCore,
        registrations: Registrations,
        engines: Engines,
        outbox: Outbox,
        data_dir: DataDir | None,
        make_worker: MakeWorker,
        *,
        keeps_orders: bool,
        allow_public: bool,
    ) -> None:
        self._core = core
        self._registrations = registrations
        self._engines = engines
        self._outbox = outbox
        self._data_dir = data_dir
        self._make_worker = make_worker
        self._keeps_orders = keeps_orders
        self._allow_public = allow_public
        self._saving = asyncio.Lock()
        self._changes = self._saved_changes = 0

    async def check(self, registration: WorkerRegistration) -> None:
        """Look at the endpoints it names. Raises InvalidFieldError."""
        await check_endpoints(registration, allow_public=self._allow_public)

    async def put(self, registration: WorkerRegistration) -> None:
        """Add or replace a worker that was checked. What its ranks hold is kept where they are
        heard as before.

        Raises what `Registrations.put` raises, and DataDirError.
        """
        self._put(registration)
        await self._follow_up(registration.worker_id)

    async def remove(self, worker_id: int) -> None:
        """Forget a worker. Raises WorkerNotFoundError, AnnouncedWorkerError, DataDirError."""
        self._outbox.perform(self._registrations.remove(worker_id))
        await self._follow_up(worker_id)

    async def order(self, worker_id: int, lifecycle: Lifecycle) -> None:
        """Note an operator's order that no bus keeps. Raises DataDirError."""
        self._core.order_worker(worker_id, lifecycle)
        await self._keep()

    def restore(self) -> int:
        """Register whoever a former process kept; how many there are."""
        if self._data_dir is None:
            return 0
        kept = self._data_dir.load()
        for worker_id, lifecycle in kept.orders.items():
            self._core.order_worker(worker_id, lifecycle)
        for registration in kept.workers:
            self._restore(registration)
        return len(kept.workers)

    def _restore(self, registration: WorkerRegistration) -> None:
        try:
            self._put(registration)
        except KvRouterError as error:
            log.warning("worker %d is not restored: %s", registration.worker_id, error)

    def _put(self, registration: WorkerRegistration) -> None:
        now_s = time.monotonic()
        fresh = time.time_ns() // 1000
        incarnation = self._registrations.incarnation(registration.worker_id, fresh)
        worker = self._make_worker(registration, incarnation)
        if worker is None:
            self._outbox.perform(self._registrations.put_incomplete(registration))
        else:
            self._registrations.put(worker, now_s)

    async def _follow_up(self, worker_id: int) -> None:
        await self._engines.settle([worker_id])
        await self._keep()

    async def _keep(self) -> None:
        """Save what is registered now; changes made while the disk writes share the next save."""
        if self._data_dir is None:
            return
        self._changes += 1
        change = self._changes
        async with self._saving:
            if self._saved_changes >= change:
                return
            covered = self._changes
            orders = self._core.fleet.orders if self._keeps_orders else {}
            kept = Kept(list(self._registrations), dict(orders))
            await asyncio.to_thread(self._data_dir.save, kept)
            self._saved_changes = covered
