"""Filters that compare a request's demands with the labels of workers.

    Pool ─role─▶ ─allowed_worker_ids─▶ ─excluded_worker_ids─▶ ─pinned_worker─▶ ─required_taints─▶
         ─lora_name─▶ ─session_affinity─▶ ─busy─▶ eligible ranks, and the ranks each filter removed

A worker's taints are its own and those of its location: `dynamo.topology/zone=a` for the domain
zone = a. A request without demands passes no filter, at no cost.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct

from router.protocol.catalogue import WorkerAnnouncement, WorkerLabels
from router.protocol.requests import RankTarget, RoutingConstraints, SelectRequest
from router.protocol.values import Phase, Rank, Role
from router.scheduler.busy import Mask
from router.scheduler.terms import FloatArray

TOPOLOGY = "dynamo.topology"

NO_CONSTRAINTS = RoutingConstraints()


class Labels(Struct, frozen=True):
    """The properties of a worker that requests may demand.

    `lora_names`: the adapters it can serve; None: any.
    """

    worker_id: int
    role: Role
    taints: frozenset[str]
    lora_names: frozenset[str] | None


class Removed(Struct, frozen=True):
    """The ranks that a filter removed, of those left by the filters before it."""

    filter: str
    ranks: tuple[Rank, ...]


class Allowed(Struct, frozen=True, eq=False):
    """The eligible ranks, and those removed by each filter, in order; masks over the pool."""

    mask: Mask
    struck: tuple[tuple[str, Mask], ...]

    @property
    def last_filter(self) -> str | None:
        """The last filter that removed a rank; None if none did."""
        return self.struck[-1][0] if self.struck else None


class Pool:
    """The ranks that may be chosen in a scope, in order, and the labels of their workers.

    Rebuilt whenever one of them changes. Filters examine each worker once, not each rank. `workers`
    are those of the ranks, one per rank. `have_prefill`: True if some have role prefill.
    """

    __slots__ = ("_are_prefill", "_index", "_labels", "_worker_of", "have_prefill", "ranks")

    def __init__(self, ranks: Sequence[Rank], workers: Sequence[WorkerAnnouncement]) -> None:
        self.ranks = ranks
        self._index = {rank: index for index, rank in enumerate(self.ranks)}
        distinct = {worker.worker_id: worker for worker in workers}
        positions = {worker_id: position for position, worker_id in enumerate(distinct)}
        self._labels = tuple(labels_of(worker) for worker in distinct.values())
        self._worker_of = np.array([positions[rank.worker_id] for rank in ranks], np.int64)
        self._are_prefill = self.where(lambda labels: labels.role == "prefill")
        self.have_prefill = bool(self._are_prefill.any())

    def where(self, keeps: Callable[[Labels], bool]) -> Mask:
        """Return the ranks of the workers that pass. O(workers)."""
        passing = [keeps(labels) for labels in self._labels]
        return np.array(passing, np.bool_)[self._worker_of]

    def for_phase(self, phase: Phase | None) -> Mask:
        """Return the ranks for this phase of a request; role prefill serves no other phase."""
        return self._are_prefill if phase == "prefill" else ~self._are_prefill

    def target(self, target: RankTarget) -> Mask:
        """Return the named rank, or every rank of the named worker. O(workers)."""
        if target.dp_rank is None:
            return self.where(lambda labels: labels.worker_id == target.worker_id)
        mask = np.zeros(len(self.ranks), np.bool_)
        index = self._index.get(Rank(target.worker_id, target.dp_rank))
        if index is not None:
            mask[index] = True
        return mask

    def factors(self, preferred: Mapping[str, float]) -> FloatArray:
        """Return the cost factor of each rank for these taints: exp(−tanh(Σ weights)).

        O(workers · taints).
        """
        sums = np.zeros(len(self._labels))
        for taint, weight in preferred.items():
            sums += weight * np.array([taint in labels.taints for labels in self._labels], np.bool_)
        factors: FloatArray = np.exp(-np.tanh(sums))[self._worker_of]
        return factors

    def removed(self, eligible: Allowed) -> tuple[Removed, ...]:
        """Return the ranks that each filter removed, by filter. O(ranks)."""
        return tuple(
            Removed(name, tuple(self.ranks[index] for index in np.flatnonzero(mask).tolist()))
            for name, mask in eligible.struck
        )


def demands_something(request: SelectRequest) -> bool:
    """Return whether any filter applies to a request, apart from the busy filter."""
    return (
        request.allowed_worker_ids is not None
        or request.excluded_worker_ids is not None
        or request.phase is not None
        or request.pinned_worker is not None
        or request.routing_constraints is not None
        or request.affinity_target is not None
        or request.lora_name is not None
    )


def eligible(
    pool: Pool,
    request: SelectRequest,
    constraints: RoutingConstraints,
    *,
    is_hard: bool,
    busy: Mask | None,
) -> Allowed:
    """Return the ranks that may serve a request.

    `constraints`: the request's, merged with those of its prefill worker. `is_hard`: a session
    stays on its rank even if that rank is busy; otherwise only while it is among the eligible
    ranks. A bound rank that is not in the pool is ignored. `busy`: ranks over a threshold; None: no
    thresholds.
    """
    bound = _bound(pool, request.affinity_target)
    mask = np.ones(len(pool.ranks), np.bool_)
    struck: list[tuple[str, Mask]] = []
    for name, kept in _filters(pool, request, constraints, bound if is_hard else None, busy):
        out = mask & ~kept
        if out.any():
            struck.append((name, out))
            mask &= kept
    if bound is not None and not is_hard and (mask & bound).any():
        struck.append(("session_affinity", mask & ~bound))
        mask &= bound
    return Allowed(mask, tuple(struck))


def labels_of(worker: WorkerAnnouncement) -> Labels:
    """Return the labels of a worker; every domain of its topology is a taint."""
    labels = worker.labels
    places = (f"{TOPOLOGY}/{domain}={place}" for domain, place in labels.topology_domains.items())
    return Labels(
        worker.worker_id,
        worker.role,
        frozenset((*labels.taints, *places)),
        None if labels.lora_names is None else frozenset(labels.lora_names),
    )


def transfer_constraints(prefill: WorkerLabels) -> RoutingConstraints:
    """Return the constraints that a prefill worker sets on the decode worker.

    They demand its own location in the domain that it names. Source: Dynamo 1.4, topology-aware KV
    transfer.
    """
    domain = prefill.kv_transfer_domain
    if domain is None or domain not in prefill.topology_domains:
        return NO_CONSTRAINTS
    taint = f"{TOPOLOGY}/{domain}={prefill.topology_domains[domain]}"
    if prefill.kv_transfer_enforcement == "preferred":
        weight = prefill.kv_transfer_preferred_weight
        return RoutingConstraints(preferred_taints={taint: 1.0 if weight is None else weight})
    return RoutingConstraints(required_taints=[taint])


def merged(one: RoutingConstraints, other: RoutingConstraints) -> RoutingConstraints:
    """Return both constraints combined; weights of the same taint add up."""
    weights = dict(one.preferred_taints)
    for taint, weight in other.preferred_taints.items():
        weights[taint] = weights.get(taint, 0.0) + weight
    return RoutingConstraints([*one.required_taints, *other.required_taints], weights)


def _filters(
    pool: Pool,
    request: SelectRequest,
    constraints: RoutingConstraints,
    bound: Mask | None,
    busy: Mask | None,
) -> Iterable[tuple[str, Mask]]:
    """Yield each applicable filter and the ranks it lets pass, in order."""
    if pool.have_prefill or request.phase == "prefill":
        yield "role", pool.for_phase(request.phase)
    yield from _named(pool, request)
    if constraints.required_taints:
        required = frozenset(constraints.required_taints)
        yield "required_taints", pool.where(lambda labels: required <= labels.taints)
    name = request.lora_name
    if name is not None:
        yield "lora_name", pool.where(lambda labels: _serves(labels, name))
    if bound is not None:
        yield "session_affinity", bound
    if busy is not None:
        yield "busy", ~busy


def _named(pool: Pool, request: SelectRequest) -> Iterable[tuple[str, Mask]]:
    """Yield the filters by worker names in the request."""
    if request.allowed_worker_ids is not None:
        allowed = frozenset(request.allowed_worker_ids)
        yield "allowed_worker_ids", pool.where(lambda labels: labels.worker_id in allowed)
    if request.excluded_worker_ids:
        excluded = frozenset(request.excluded_worker_ids)
        yield "excluded_worker_ids", pool.where(lambda labels: labels.worker_id not in excluded)
    if request.pinned_worker is not None:
        yield "pinned_worker", pool.target(request.pinned_worker)


def _bound(pool: Pool, target: RankTarget | None) -> Mask | None:
    """Return the ranks a session is bound to. Returns None if unbound, or if they are gone."""
    if target is None:
        return None
    bound = pool.target(target)
    return bound if bound.any() else None


def _serves(labels: Labels, lora_name: str) -> bool:
    return labels.lora_names is None or lora_name in labels.lora_names
