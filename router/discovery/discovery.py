"""Engines of a Kubernetes cluster, registered while they are there.

    API server ─ Watching ─▶ objects ─ found_in ─▶ wanted ─ settle ─▶ Registrar ─▶ core, followers

Nobody is forgotten while the API server is away. A pod that ends is forgotten at once, one that is
merely not ready after a while, since with it goes what is known of its cache.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from random import Random

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core_host import CoreHost
from router.discovery.api_server import ApiServer
from router.discovery.found import OWNER, Found, check_template, found_in, registration
from router.discovery.watching import Watching
from router.discovery_config import DiscoveryConfig
from router.errors import ConfigError, InvalidFieldError, KvRouterError
from router.process.settings import id_of_name

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often it is looked who has not been ready for long."""
AGAIN_S = 5.0
"""Whoever was refused is tried again after so long: a socket may have become free."""
STATES = ("registered", "refused", "unready", "over_limit")


class Discovery(Collector):
    """One cluster, and what of it is registered here."""

    def __init__(self, config: DiscoveryConfig, host: CoreHost, random: Random) -> None:
        """Raises ConfigError."""
        self._config = config
        self._registrar, self._registrations = host.registrar, host.registrations
        self._check_template()
        server = ApiServer(config)
        self._namespace = server.namespace
        self._news = asyncio.Event()
        self._watching = Watching(server, self._news.set, random)
        self._registered: dict[str, tuple[int, Found]] = {}
        self._refused: dict[str, tuple[Found, float]] = {}
        self._unready_since_s: dict[str, float] = {}
        self._counts = dict.fromkeys(STATES, 0)
        self._is_tidy = False
        host.metrics.registry.register(self)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watching.run())
            group.create_task(self._settle_forever())

    def collect(self) -> Iterator[Metric]:
        """Metrics of this moment."""
        prefix, watching = "kv_router_discovery", self._watching
        text = "Engines of the cluster, by what became of them"
        workers = GaugeMetricFamily(f"{prefix}_workers", text, labels=("state",))
        for state, count in self._counts.items():
            workers.add_metric((state,), count)
        yield workers
        most = self._config.discovery_max_workers
        yield GaugeMetricFamily(f"{prefix}_workers_max", "Limit on those registered", most)
        text = "1 while what is known is the cluster's"
        yield GaugeMetricFamily(f"{prefix}_synced", text, watching.is_synced)
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"{prefix}_{name}", text, getattr(watching, name))

    async def _settle_forever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()
            if self._watching.was_listed:
                await self._settle(time.monotonic())

    async def _settle(self, now_s: float) -> None:
        """Register and forget until what is registered is what is wanted."""
        found = self._found()
        wanted = self._wanted(found, now_s)
        await self._tidy(found)
        for name in [name for name in self._registered if name not in wanted]:
            worker_id, _ = self._registered.pop(name)
            await self._remove(worker_id)
        self._refused = {n: each for n, each in self._refused.items() if n in wanted}
        for each in wanted.values():
            if self._is_news(each, now_s):
                await self._put(each, now_s)
        self._counts["registered"] = len(self._registered)
        self._counts["refused"] = len(self._refused)

    def _found(self) -> dict[str, Found]:
        """By name; of an engine that is in several slices, the first."""
        found: dict[str, Found] = {}
        for _, each in sorted(self._watching.objects.items()):
            for engine in found_in(each):
                found.setdefault(engine.name, engine)
        return found

    def _wanted(self, found: dict[str, Found], now_s: float) -> dict[str, Found]:
        """Who is to be registered: known ones first, then by name, up to the limit."""
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

    def _is_news(self, each: Found, now_s: float) -> bool:
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
        """Whoever is not ours any more, or was removed by somebody else, is passed over."""
        try:
            await self._registrar.remove(worker_id)
        except KvRouterError as error:
            log.info("discovery: worker %d is not forgotten: %s", worker_id, error)
        else:
            log.info("worker %d is no longer there", worker_id)

    async def _tidy(self, found: dict[str, Found]) -> None:
        """Once: whoever a former process found, and is gone meanwhile."""
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


_COUNTERS = {
    "lists": "Times that all objects were asked for",
    "watches": "Watches begun",
    "changes": "Changes that watches told",
    "forgotten": "Times that the server had forgotten where we were (410)",
    "failures": "Requests that failed",
}
