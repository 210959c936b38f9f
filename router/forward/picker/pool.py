"""The endpoints of a gateway's pool: addresses, each with the rank that listens there."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from msgspec import Struct

from router.forward.picker.steering import is_in
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


def address_of(url: str) -> str:
    """Return host and port of a URL. Raises InvalidFieldError for an invalid URL."""
    origin = Origin.of(url)
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    return f"{host}:{origin.port}"


def members(pool: PoolView, subset: frozenset[str] | None) -> list[PoolEndpoint]:
    """Return the endpoints of a pool that are in a subset; None: all. O(endpoints)."""
    if subset is None:
        return list(pool.endpoints())
    return [each for each in pool.endpoints() if is_in(each.address, subset)]
