"""An InferencePool of a cluster, followed: its engines by URL, and what the picker asks of it.

    InferencePool ─ selector, ports ─▶ pods ─▶ http://podIP:port
    InferenceObjectives, InferenceModelRewrites ─▶ the picker

The pool that does not exist (any more) has no engines. While the API server is away, the last known
objects count.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from random import Random
from typing import Any

from msgspec import Struct

from router.config.discovery import ClusterConfig
from router.discovery.attach.engine_url import EngineUrl, parsed_url
from router.discovery.kubernetes.api_server import PODS, ApiServer, Q, Resource, namespace_of
from router.discovery.kubernetes.found import Found
from router.discovery.kubernetes.objects import (
    InferenceModelRewrite,
    InferenceObjective,
    InferencePool,
    Pod,
)
from router.discovery.kubernetes.pool import (
    NO_REWRITES,
    endpoints_of,
    engine_url,
    priorities_for,
    rewrites_for,
)
from router.discovery.kubernetes.watching import ClusterWatch, Watches
from router.errors import InvalidFieldError

_POOLS = Resource(
    "inferencepools.inference.networking.k8s.io",
    "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools",
    InferencePool,
)
_GROUPS = ("llm-d.ai", "inference.networking.x-k8s.io")
"""The group of objectives and rewrites, and its former name. Both are version v1alpha2."""


def _optional(group: str, plural: str, kind: type[Q]) -> Resource[Q]:
    return Resource(f"{plural}.{group}", f"/apis/{group}/v1alpha2/namespaces/{{}}/{plural}", kind)


class _PodEngines(Struct, frozen=True):
    """The engines of a pod; `ready_at`: the addresses of those that may be chosen."""

    pod: Pod
    found: tuple[Found, ...]
    ready_at: frozenset[str]


class PoolWatch:
    """One pool: its engines, and what its objectives and rewrites say.

    `version`: counts changes of the engines.
    """

    def __init__(self, config: ClusterConfig, random: Random) -> None:
        """Raise ConfigError if the namespace or the API server is unknown."""
        namespace, _, self._name = config.epp_pool.rpartition("/")
        self._namespace = namespace or namespace_of(config)
        self._config, self._random = config, random
        self._pool: InferencePool | None = None
        self._pool_changed = asyncio.Event()
        self._priorities: dict[str, int] = {}
        self._rewrites = NO_REWRITES
        self._by_pod: dict[str, _PodEngines] = {}
        self._ready_at: set[str] = set()
        self.version = 0
        self._changed: Callable[[], None] = lambda: None
        only = {"fieldSelector": f"metadata.name={self._name}"}
        self._pools = ClusterWatch(self._server(_POOLS, only), self._take_pool, random)
        self._pods = ClusterWatch(self._server(PODS, {}), self._take_pods, random)
        objectives = (_optional(g, "inferenceobjectives", InferenceObjective) for g in _GROUPS)
        rewrites = (_optional(g, "inferencemodelrewrites", InferenceModelRewrite) for g in _GROUPS)
        self._objectives = [
            self._optional_watch(each, self._take_objectives) for each in objectives
        ]
        self._models = [self._optional_watch(each, self._take_rewrites) for each in rewrites]
        self.watches = Watches(self._pools, self._pods, *self._objectives, *self._models)

    def _server(self, resource: Resource[Q], chosen: Mapping[str, str]) -> ApiServer[Q]:
        return ApiServer(self._config, resource, self._namespace, chosen)

    def _optional_watch(self, resource: Resource[Q], take: Callable[[], None]) -> ClusterWatch[Q]:
        return ClusterWatch(self._server(resource, {}), take, self._random, is_optional=True)

    async def run(self, on_change: Callable[[], None]) -> None:
        """Follow the cluster until cancelled."""
        self._changed = on_change
        async with asyncio.TaskGroup() as group:
            watches: list[ClusterWatch[Any]] = [self._pools, *self._objectives, *self._models]
            for each in watches:
                group.create_task(each.run())
            await self._follow_pods(group)

    async def _follow_pods(self, group: asyncio.TaskGroup) -> None:
        """Watch the pods of the pool's selector; of another one, as soon as it changes."""
        selector, watching = "", None
        while True:
            await self._pool_changed.wait()
            self._pool_changed.clear()
            wanted = "" if self._pool is None else _selector(self._pool)
            if wanted in ("", selector):
                continue
            if watching is not None:
                watching.cancel()
                await asyncio.wait([watching])
            selector = wanted
            self._pods.ask(self._server(PODS, {"labelSelector": selector}))
            watching = group.create_task(self._pods.run())

    # ── Changes ──────────────────────────────────────────────────────────────────────────────────

    def _take_pool(self) -> None:
        before, self._pool = self._pool, self._pools.objects.get(self._name)
        if before is not None and self._pool is not None and before.spec == self._pool.spec:
            return  # gateways write its status
        self._pool_changed.set()
        self._by_pod = {}
        self._take_pods()

    def _take_pods(self) -> None:
        """Read the pods that have changed. O(pods); one that has not costs less than 1 µs."""
        pool, known = self._pool, self._by_pod
        self._by_pod = {}
        if pool is not None:
            for name, pod in self._pods.objects.items():
                before = known.get(name)
                is_same = before is not None and (before.pod is pod or before.pod == pod)
                self._by_pod[name] = before if is_same and before else _engines_of(pool, pod)
        self._ready_at = set().union(*(each.ready_at for each in self._by_pod.values()))
        self.version += 1
        self._changed()

    def _take_objectives(self) -> None:
        found: dict[str, int] = {}
        for each in reversed(self._objectives):
            found |= priorities_for(self._name, each.objects.values())
        self._priorities = found

    def _take_rewrites(self) -> None:
        objects = [each for watch in self._models for each in watch.objects.values()]
        self._rewrites = rewrites_for(self._name, objects)

    # ── Engines ──────────────────────────────────────────────────────────────────────────────────

    @property
    def is_known(self) -> bool:
        """True once the pool was listed, and its pods if there is one."""
        return self._pools.was_listed and (self._pool is None or self._pods.was_listed)

    def found(self) -> dict[str, Found]:
        """Return the engines by name. O(pods)."""
        return {each.name: each for pod in self._by_pod.values() for each in pod.found}

    # ── For the picker ───────────────────────────────────────────────────────────────────────────

    def unready_reason(self) -> str | None:
        """Return why the engines of the pool are not known, or None."""
        pool = f"InferencePool {self._namespace}/{self._name}"
        if not self._pools.was_listed:
            return f"{pool} is not known yet: {self._pools.problem or 'not listed'}"
        if self._pool is None:
            return f"{pool} does not exist"
        if not self._pods.was_listed:
            return f"the pods of {pool} are not known yet: {self._pods.problem or 'not listed'}"
        return None

    def is_ready(self, address: str) -> bool:
        """Return whether the engine at `ip:port` is of the pool, and ready. O(1)."""
        return address in self._ready_at

    def priority(self, objective: str) -> int | None:
        """Return the priority of an InferenceObjective of the pool; None for an unknown one."""
        return self._priorities.get(objective)

    def model(self, asked: str) -> str | None:
        """Return the model that takes the place of one that was asked for; None: the same."""
        return self._rewrites.model(asked, self._random.random())


def _selector(pool: InferencePool) -> str:
    return ",".join(
        f"{key}={value}" for key, value in sorted(pool.spec.selector.match_labels.items())
    )


def url_of(found: Found) -> EngineUrl:
    """Return the address of an engine of a pool. Raises InvalidFieldError."""
    return parsed_url(engine_url(found), f"pod {found.name}")


def _engines_of(pool: InferencePool, pod: Pod) -> _PodEngines:
    found = tuple(endpoints_of(pool, pod))
    ready = (each for each in found if each.is_ready and not each.is_ending)
    return _PodEngines(pod, found, frozenset(_addresses(ready)))


def _addresses(found: Iterable[Found]) -> Iterator[str]:
    for each in found:
        with suppress(InvalidFieldError):
            yield url_of(each).url.removeprefix("http://")
