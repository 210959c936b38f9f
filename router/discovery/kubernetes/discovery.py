"""Registration of the engines found in a Kubernetes cluster.

    API server ─ Watching ─▶ objects ─ found_in ─▶ wanted ─ settle ─▶ Registrar ─▶ core, followers

Registrations stay while the API server is unreachable. A terminating pod is removed at once. A pod
that is merely not ready is removed only after `discovery_unready_s`, since the removal also drops
the index of its cache.
"""

import asyncio
import logging
import time
from random import Random

from prometheus_client import CollectorRegistry

from router.config.discovery import DiscoveryConfig
from router.core.registrations import Registrations
from router.discovery.kubernetes.api_server import ApiServer
from router.discovery.kubernetes.found import OWNER, Found, check_template, found_in, registration
from router.discovery.kubernetes.watching import ClusterWatch
from router.discovery.registration import Registrar
from router.errors import ConfigError, InvalidFieldError, KvRouterError
from router.runtime.process.metrics import Rows, counter, expose, gauge
from router.runtime.process.settings import id_of_name

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""The interval of the checks for pods that have been unready too long."""
AGAIN_S = 5.0
"""The delay until a refused registration is retried: a socket may have become free."""
STATES = ("registered", "refused", "unready", "over_limit")


class Discovery:
    """The engines of one cluster, and those of them that are registered here."""

    def __init__(
        self,
        config: DiscoveryConfig,
        registrar: Registrar,
        registrations: Registrations,
        registry: CollectorRegistry,
        random: Random,
    ) -> None:
        """Check the template and register the metrics. Raises ConfigError."""
        self._config = config
        self._registrar, self._registrations = registrar, registrations
        self._check_template()
        server = ApiServer(config)
        self._namespace = server.namespace
        self._changed = asyncio.Event()
        self._watching = ClusterWatch(server, self._changed.set, random)
        self._registered: dict[str, tuple[int, Found]] = {}
        self._refused: dict[str, tuple[Found, float]] = {}
        self._unready_since_s: dict[str, float] = {}
        self._counts = dict.fromkeys(STATES, 0)
        self._is_tidy = False
        expose(registry, "kv_router_discovery_", _METRICS, self)

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watching.run())
            group.create_task(self._reconcile_forever())

    async def _reconcile_forever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            if self._watching.was_listed:
                await self._settle(time.monotonic())

    async def _settle(self, now_s: float) -> None:
        """Register and remove workers until the registered ones equal the wanted ones."""
        found = self._found()
        wanted = self._wanted(found, now_s)
        await self._tidy(found)
        for name in [name for name in self._registered if name not in wanted]:
            worker_id, _ = self._registered.pop(name)
            await self._remove(worker_id)
        self._refused = {n: each for n, each in self._refused.items() if n in wanted}
        for each in wanted.values():
            if self._is_new(each, now_s):
                await self._put(each, now_s)
        self._counts["registered"] = len(self._registered)
        self._counts["refused"] = len(self._refused)

    def _found(self) -> dict[str, Found]:
        """Return the engines by name; an engine in several slices is taken from the first."""
        found: dict[str, Found] = {}
        for _, each in sorted(self._watching.objects.items()):
            for engine in found_in(each):
                found.setdefault(engine.name, engine)
        return found

    def _wanted(self, found: dict[str, Found], now_s: float) -> dict[str, Found]:
        """Return the engines to register, up to the limit: registered ones first, then by name."""
        unready = {name for name, each in found.items() if not each.is_ready}
        since_s = {name: self._unready_since_s.get(name, now_s) for name in sorted(unready)}
        self._unready_since_s = since_s
        stays_s = self._config.discovery_unready_s
        able = [
            each
            for name, each in found.items()
            if not each.is_ending
            and (each.is_ready or (name in self._registered and now_s - since_s[name] < stays_s))
        ]
        able.sort(key=lambda each: (each.name not in self._registered, each.name))
        most = self._config.discovery_max_workers
        self._counts["unready"] = len(unready)
        self._counts["over_limit"] = max(0, len(able) - most)
        return {each.name: each for each in able[:most]}

    def _is_new(self, each: Found, now_s: float) -> bool:
        known = self._registered.get(each.name)
        if known is not None:
            return (known[1].ip, known[1].said) != (each.ip, each.said)
        refused = self._refused.get(each.name)
        return refused is None or refused[0] != each or now_s - refused[1] >= AGAIN_S

    async def _put(self, each: Found, now_s: float) -> None:
        worker_id = id_of_name(each.name)
        template = self._config.discovery_worker
        try:
            worker = registration(template, self._namespace, each, worker_id)
            await self._registrar.check(worker)
            await self._registrar.put(worker)
        except KvRouterError as error:
            if each.name not in self._refused:
                log.warning("%s at %s is not registered: %s", each.name, each.ip, error)
            self._refused[each.name] = (each, now_s)
            return
        log.info("worker %d (%s) was found at %s", worker_id, each.name, each.ip)
        self._refused.pop(each.name, None)
        self._registered[each.name] = (worker_id, each)

    async def _remove(self, worker_id: int) -> None:
        """Remove a registration; skips one that is not ours or was removed by another caller."""
        try:
            await self._registrar.remove(worker_id)
        except KvRouterError as error:
            log.info("discovery: worker %d was not removed: %s", worker_id, error)
        else:
            log.info("worker %d removed: no longer found in the cluster", worker_id)

    async def _tidy(self, found: dict[str, Found]) -> None:
        """Remove, once, the registrations of an earlier process that the cluster no longer has."""
        if self._is_tidy:
            return
        self._is_tidy = True
        ours = f"{OWNER}{self._namespace}/"
        for each in list(self._registrations):
            owner = each.stable_routing_id or ""
            if owner.startswith(ours) and owner.removeprefix(ours) not in found:
                await self._remove(each.worker_id)

    def _check_template(self) -> None:
        try:
            check_template(self._config.discovery_worker)
        except InvalidFieldError as error:
            raise ConfigError("discovery_worker", error.reason, error.allowed) from error


_METRICS: Rows = {
    "workers": gauge("Engines of the cluster, by registration state", "_counts", "state"),
    "workers_max": gauge("Limit of registered engines", "_config.discovery_max_workers"),
    "synced": gauge(
        "1 while the known objects are up to date with the cluster", "_watching.is_synced"
    ),
    "lists": counter("Lists of all objects requested", "_watching."),
    "watches": counter("Watches started", "_watching."),
    "changes": counter("Changes received from watches", "_watching."),
    "forgotten": counter("Resource versions that the server no longer had (410)", "_watching."),
    "failures": counter("Requests that failed", "_watching."),
}
