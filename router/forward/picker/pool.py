"""The endpoints of a gateway's pool: addresses, each with the rank that listens there."""

from collections.abc import Collection, Iterable, Iterator
from itertools import compress
from typing import Protocol

from msgspec import Struct

from router.forward.picker.steering import in_subset
from router.forward.resilience.worker_list import WorkerList
from router.runtime.http_client import Origin


class PoolEndpoint(Struct, frozen=True):
    """An address of the pool, `ip:port`, and the rank behind it.

    `dp_rank`: None if all ranks of the worker listen there, and a header names one of them. `url`:
    of its worker, as its router names it.
    """

    address: str
    worker_id: int
    dp_rank: int | None
    url: str


class PoolView(Protocol):
    """A pool of a gateway: its endpoints, and the priorities of its objectives."""

    def unready_reason(self) -> str | None:
        """Return why the pool is not known yet, or None."""

    def endpoints(self) -> Iterable[PoolEndpoint]:
        """Return the endpoints that are ready."""

    def endpoint(self, worker_id: int, dp_rank: int, url: str) -> PoolEndpoint:
        """Return the endpoint of a rank. `url`: of its worker. Raises InvalidFieldError."""

    def priority(self, objective: str) -> int:
        """Return the priority of an InferenceObjective; 0 for an unknown one."""

    def model(self, asked: str) -> str | None:
        """Return the model that takes the place of one that was asked for; None: the same."""

    def outsiders(self) -> Collection[int]:
        """Return the workers of the router that are none of the pool, or not ready. O(1)."""


class ClusterPool(Protocol):
    """An InferencePool of a Kubernetes cluster. `version`: counts changes of its engines."""

    version: int

    def unready_reason(self) -> str | None:
        """Return why its engines are not known, or None."""

    def is_ready(self, address: str) -> bool:
        """Return whether the engine at `ip:port` is of the pool, and ready."""

    def priority(self, objective: str) -> int | None:
        """Return the priority of an objective of the pool; None for an unknown one."""

    def model(self, asked: str) -> str | None:
        """Return the model that takes the place of one that was asked for; None: the same."""


class RouterPool:
    """The workers of a router as a pool: each has one address.

    `objectives`: priorities by name.
    """

    __slots__ = ("_objectives", "_roster")

    def __init__(self, roster: WorkerList, objectives: dict[str, int]) -> None:
        self._roster = roster
        self._objectives = objectives

    def unready_reason(self) -> str | None:
        """Return why the workers are not known yet, or None."""
        return self._roster.problem

    def endpoints(self) -> Iterator[PoolEndpoint]:
        """Yield the endpoints of all workers."""
        for each in self._roster.workers.values():
            yield PoolEndpoint(address_of(each.endpoint), each.worker_id, None, each.endpoint)

    def endpoint(self, worker_id: int, dp_rank: int, url: str) -> PoolEndpoint:  # noqa: ARG002
        """Return the endpoint of a worker. Raises InvalidFieldError for an invalid URL."""
        return PoolEndpoint(address_of(url), worker_id, None, url)

    def priority(self, objective: str) -> int:
        """Return the priority of an objective; 0 for an unknown one."""
        return self._objectives.get(objective, 0)

    def model(self, asked: str) -> str | None:  # noqa: ARG002
        """Return None: a router renames no model."""
        return None

    def outsiders(self) -> Collection[int]:
        """Return no worker: all are of the pool."""
        return ()

    @property
    def version(self) -> int:
        """The count of changes of the workers."""
        return self._roster.version


class KubernetesPool:
    """The workers of a router that are ready in a pool of a cluster.

    `listed`: all workers, with the priorities of objectives that the cluster does not have.
    """

    __slots__ = ("_cluster", "_listed", "_outsiders", "_versions")

    def __init__(self, listed: RouterPool, cluster: ClusterPool) -> None:
        self._listed = listed
        self._cluster = cluster
        self._outsiders: list[int] = []
        self._versions = (-1, -1)

    def unready_reason(self) -> str | None:
        """Return why the pool or the workers are not known yet, or None."""
        return self._cluster.unready_reason() or self._listed.unready_reason()

    def endpoints(self) -> Iterator[PoolEndpoint]:
        """Yield the endpoints of the workers that are ready in the pool."""
        return (each for each in self._listed.endpoints() if self._cluster.is_ready(each.address))

    def endpoint(self, worker_id: int, dp_rank: int, url: str) -> PoolEndpoint:
        """Return the endpoint of a worker. Raises InvalidFieldError for an invalid URL."""
        return self._listed.endpoint(worker_id, dp_rank, url)

    def priority(self, objective: str) -> int:
        """Return the priority of an objective; 0 for an unknown one."""
        found = self._cluster.priority(objective)
        return self._listed.priority(objective) if found is None else found

    def model(self, asked: str) -> str | None:
        """Return the model that takes the place of one that was asked for; None: the same."""
        return self._cluster.model(asked)

    def outsiders(self) -> Collection[int]:
        """Return the workers that no gateway of the pool reaches. O(1), after changes O(workers).

        A gateway that does not know a chosen endpoint sends the request to any other.
        """
        versions = (self._listed.version, self._cluster.version)
        if self._versions != versions:
            self._versions = versions
            ready = self._cluster.is_ready
            listed = self._listed.endpoints()
            self._outsiders = [e.worker_id for e in listed if not ready(e.address)]
        return self._outsiders


def address_of(url: str) -> str:
    """Return host and port of a URL. Raises InvalidFieldError for an invalid URL."""
    origin = Origin.of(url)
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    return f"{host}:{origin.port}"


def members(pool: PoolView, subset: frozenset[str] | None) -> list[PoolEndpoint]:
    """Return the endpoints of a pool that are in a subset; None: all. O(endpoints)."""
    endpoints = list(pool.endpoints())
    if subset is None:
        return endpoints
    return list(compress(endpoints, in_subset((each.address for each in endpoints), subset)))
