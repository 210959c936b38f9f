"""Registration of the engines found in a Kubernetes cluster.

    API server ─ EngineSource ─▶ found ─ settle ─▶ EngineSource ─▶ core, followers

Registrations stay while the API server is unreachable. A terminating pod is removed at once. A pod
that is merely not ready is not chosen, and removed only after `discovery_unready_s`, since the
removal also drops the index of its cache.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from random import Random
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from router.config.discovery import ClusterConfig, DiscoveryConfig
from router.core.registrations import Registrations
from router.discovery.kubernetes.api_server import (
    PODS,
    SLICES,
    ApiServer,
    Q,
    Resource,
    namespace_of,
)
from router.discovery.kubernetes.found import OWNER, Found, check_template, found_in, registration
from router.discovery.kubernetes.objects import EndpointSlice, Pod
from router.discovery.kubernetes.watching import PREFIX, WATCH_METRICS, ClusterWatch, Watches
from router.discovery.registration import Registrar
from router.errors import ConfigError, InvalidFieldError, KvRouterError
from router.runtime.process.metrics import Rows, expose, gauge
from router.runtime.process.settings import id_of_name

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""The interval of the checks for pods that have been unready too long."""
SETTLE_S = 0.05
"""The time for which changes are collected, and then applied together: a rollout is many."""
AGAIN_S = 5.0
"""The delay until a refused registration is retried: a socket may have become free."""
STATES = ("registered", "refused", "unready", "over_limit")


class EngineSource(Protocol):
    """Engines of a cluster, and how they are registered.

    `owner`: the beginning of their `stable_routing_id`. `is_known`: the cluster was listed.
    """

    owner: str
    watches: Watches

    @property
    def is_known(self) -> bool:
        """True once the engines of the cluster are known."""

    def run(self, on_change: Callable[[], None]) -> Coroutine[Any, Any, None]:
        """Follow the cluster until cancelled."""

    def found(self) -> dict[str, Found]:
        """Return the engines by name. O(pods)."""

    def worker_id(self, found: Found) -> int:
        """Return the worker id of an engine. Raises InvalidFieldError."""

    async def put(self, found: Found) -> None:
        """Register an engine, or replace its registration. Raises KvRouterError."""

    async def remove(self, worker_id: int) -> None:
        """Remove a registration. Raises KvRouterError."""


class LabelledEngines:
    """Pods or endpoints with labels: registered by a template, and what their annotation says."""

    def __init__(
        self,
        config: DiscoveryConfig,
        cluster: ClusterConfig,
        registrar: Registrar,
        random: Random,
    ) -> None:
        """Check the template. Raises ConfigError."""
        self._template = config.discovery_worker
        try:
            check_template(self._template)
        except InvalidFieldError as error:
            raise ConfigError("discovery_worker", error.reason, error.allowed) from error
        self._registrar = registrar
        self._namespace = namespace_of(cluster)
        self.owner = f"{OWNER}{self._namespace}/"
        self._watch: ClusterWatch[Pod] | ClusterWatch[EndpointSlice] = (
            self._watched(cluster, config.discovery_selector, PODS, random)
            if config.discovery == "pods"
            else self._watched(cluster, config.discovery_selector, SLICES, random)
        )
        self._on_change: Callable[[], None] = lambda: None
        self.watches = Watches(self._watch)

    def _watched(
        self, cluster: ClusterConfig, selector: str, resource: Resource[Q], random: Random
    ) -> ClusterWatch[Q]:
        chosen = {"labelSelector": selector}
        server = ApiServer(cluster, resource, self._namespace, chosen)
        return ClusterWatch(server, self._note, random)

    @property
    def is_known(self) -> bool:
        """True once the cluster was listed."""
        return self._watch.was_listed

    async def run(self, on_change: Callable[[], None]) -> None:
        """Follow the cluster until cancelled."""
        self._on_change = on_change
        await self._watch.run()

    def _note(self) -> None:
        self._on_change()

    def found(self) -> dict[str, Found]:
        """Return the engines by name; an engine in several slices is taken from the first."""
        objects: Mapping[str, Pod | EndpointSlice] = self._watch.objects
        found: dict[str, Found] = {}
        for _, each in sorted(objects.items()):
            for engine in found_in(each):
                found.setdefault(engine.name, engine)
        return found

    def worker_id(self, found: Found) -> int:
        """Return the worker id of an engine."""
        return id_of_name(found.name)

    async def put(self, found: Found) -> None:
        """Register an engine. Raises KvRouterError."""
        worker_id = self.worker_id(found)
        worker = registration(self._template, self._namespace, found, worker_id)
        await self._registrar.check(worker)
        await self._registrar.put(worker)

    async def remove(self, worker_id: int) -> None:
        """Remove a registration. Raises KvRouterError."""
        await self._registrar.remove(worker_id)


class Discovery:
    """The engines of one cluster, and those of them that are registered here.

    `held`: reasons not to choose workers, by id; those of pods that are not ready are set here.
    """

    def __init__(
        self,
        config: DiscoveryConfig,
        source: EngineSource,
        registrations: Registrations,
        held: dict[int, str],
        registry: CollectorRegistry,
    ) -> None:
        self._config = config
        self._source = source
        self._registrations = registrations
        self._held = held
        self._changed = asyncio.Event()
        self._registered: dict[str, tuple[int, Found]] = {}
        self._refused: dict[str, tuple[Found, float]] = {}
        self._unready_since_s: dict[str, float] = {}
        self._counts = dict.fromkeys(STATES, 0)
        self._is_tidy = False
        expose(registry, PREFIX, _METRICS, self)
        expose(registry, PREFIX, WATCH_METRICS, source.watches)

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._source.run(self._changed.set))
            group.create_task(self._reconcile_forever())

    async def _reconcile_forever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
            else:
                await asyncio.sleep(SETTLE_S)
            self._changed.clear()
            if self._source.is_known:
                await self._settle(time.monotonic())

    async def _settle(self, now_s: float) -> None:
        """Register and remove workers until the registered ones equal the wanted ones."""
        found = self._source.found()
        wanted = self._wanted(found, now_s)
        await self._tidy(found)
        for name in [name for name in self._registered if name not in wanted]:
            worker_id, _ = self._registered.pop(name)
            await self._remove(worker_id)
        self._hold_unready(wanted)
        self._refused = {n: each for n, each in self._refused.items() if n in wanted}
        for each in wanted.values():
            if self._is_new(each, now_s):
                await self._put(each, now_s)
        self._counts["registered"] = len(self._registered)
        self._counts["refused"] = len(self._refused)

    def _hold_unready(self, wanted: dict[str, Found]) -> None:
        """Keep requests from registered engines whose pods are not ready."""
        for name, (worker_id, _) in self._registered.items():
            if wanted[name].is_ready:
                self._held.pop(worker_id, None)
            else:
                self._held[worker_id] = f"its pod is not ready ({name})"

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
            return _settings(known[1]) != _settings(each)
        refused = self._refused.get(each.name)
        return refused is None or refused[0] != each or now_s - refused[1] >= AGAIN_S

    async def _put(self, each: Found, now_s: float) -> None:
        try:
            worker_id = self._source.worker_id(each)
            known = self._registered.get(each.name)
            if known is not None and known[0] != worker_id:
                del self._registered[each.name]
                await self._remove(known[0])
            await self._source.put(each)
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
        self._held.pop(worker_id, None)
        try:
            await self._source.remove(worker_id)
        except KvRouterError as error:
            log.info("discovery: worker %d was not removed: %s", worker_id, error)
        else:
            log.info("worker %d removed: no longer found in the cluster", worker_id)

    async def _tidy(self, found: dict[str, Found]) -> None:
        """Remove, once, the registrations of an earlier process that the cluster no longer has."""
        if self._is_tidy:
            return
        self._is_tidy = True
        known = set(self._worker_ids(found))
        for each in list(self._registrations):
            is_own = (each.stable_routing_id or "").startswith(self._source.owner)
            if is_own and each.worker_id not in known:
                await self._remove(each.worker_id)

    def _worker_ids(self, found: dict[str, Found]) -> Iterator[int]:
        for each in found.values():
            with suppress(InvalidFieldError):
                yield self._source.worker_id(each)


def _settings(found: Found) -> tuple[str, str, int]:
    """Return what a registration is made of."""
    return found.ip, found.said, found.port


_METRICS: Rows = {
    "workers": gauge("Engines of the cluster, by registration state", "_counts", "state"),
    "workers_max": gauge("Limit of registered engines", "_config.discovery_max_workers"),
}
