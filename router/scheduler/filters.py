"""Filters that compare a request's demands with the labels of workers.

    Pool ─role─▶ ─allowed_worker_ids─▶ ─excluded_worker_ids─▶ ─pinned_worker─▶ ─required_taints─▶
         ─lora_name─▶ ─session_affinity─▶ ─busy─▶ eligible ranks, and the ranks each filter removed

A worker's taints are its own and those of its location: `dynamo.topology/zone=a` for the domain
zone = a. A request without demands passes no filter, at no cost.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import and_, or_
from typing import TypeAlias

import numpy as np
from msgspec import Struct

from router.protocol.catalogue import WorkerAnnouncement, WorkerLabels
from router.protocol.requests import RankTarget, RoutingConstraints, SelectRequest
from router.protocol.values import Phase, Rank
from router.scheduler.busy import Mask
from router.scheduler.candidates import Positions
from router.scheduler.terms import FloatArray

TOPOLOGY = "dynamo.topology"

NO_CONSTRAINTS = RoutingConstraints()

Bits: TypeAlias = int
"""A set of ranks of a pool: bit i stands for the i-th. Sets of 16 ranks cost 0.1 µs each, masks of
numpy 1 µs."""


class Removed(Struct, frozen=True):
    """The ranks that a filter removed, of those left by the filters before it."""

    filter: str
    ranks: tuple[Rank, ...]


class Allowed(Struct, frozen=True, eq=False, gc=False):
    """The eligible ranks, and those removed by each filter, in order."""

    kept: Bits
    struck: Sequence[tuple[str, Bits]]

    @property
    def last_filter(self) -> str | None:
        """The last filter that removed a rank; None if none did."""
        return self.struck[-1][0] if self.struck else None


class Pool:
    """The ranks that may be chosen in a scope, in order, and the ranks with each label.

    Rebuilt whenever one of them changes. `workers` are those of the ranks, one per rank. `all`: all
    ranks. `have_prefill`: True if some have role prefill.
    """

    __slots__ = (
        "_any_adapter",
        "_index",
        "_of_adapter",
        "_of_taint",
        "_of_worker",
        "_prefill",
        "all",
        "have_prefill",
        "ranks",
    )

    def __init__(self, ranks: Sequence[Rank], workers: Sequence[WorkerAnnouncement]) -> None:
        self.ranks = ranks
        self.all: Bits = (1 << len(ranks)) - 1
        self._index = {rank: index for index, rank in enumerate(ranks)}
        self._of_worker: dict[int, Bits] = {}
        for index, rank in enumerate(ranks):
            self._of_worker[rank.worker_id] = self._of_worker.get(rank.worker_id, 0) | 1 << index
        self._of_taint: dict[str, Bits] = {}
        self._of_adapter: dict[str, Bits] = {}
        self._any_adapter = self._prefill = 0
        for worker_id, worker in {each.worker_id: each for each in workers}.items():
            bits, names = self._of_worker[worker_id], worker.labels.lora_names
            for taint in taints_of(worker.labels):
                self._of_taint[taint] = self._of_taint.get(taint, 0) | bits
            for name in names or ():
                self._of_adapter[name] = self._of_adapter.get(name, 0) | bits
            self._any_adapter |= bits if names is None else 0
            self._prefill |= bits if worker.role == "prefill" else 0
        self.have_prefill = self._prefill != 0

    def of_workers(self, worker_ids: Iterable[int]) -> Bits:
        """Return the ranks of these workers; ids of others are ignored. O(ids)."""
        found = [self._of_worker.get(worker_id, 0) for worker_id in worker_ids]
        return reduce(or_, found, 0)

    def with_taints(self, taints: Iterable[str]) -> Bits:
        """Return the ranks that have all these taints. O(taints)."""
        found = [self._of_taint.get(taint, 0) for taint in taints]
        return reduce(and_, found, self.all)

    def serving(self, lora_name: str) -> Bits:
        """Return the ranks that can serve an adapter."""
        return self._any_adapter | self._of_adapter.get(lora_name, 0)

    def for_phase(self, phase: Phase | None) -> Bits:
        """Return the ranks for this phase of a request; role prefill serves no other phase."""
        return self._prefill if phase == "prefill" else self.all & ~self._prefill

    def target(self, target: RankTarget) -> Bits:
        """Return the named rank, or every rank of the named worker."""
        if target.dp_rank is None:
            return self._of_worker.get(target.worker_id, 0)
        index = self._index.get(Rank(target.worker_id, target.dp_rank))
        return 0 if index is None else 1 << index

    def factors(self, preferred: Mapping[str, float]) -> FloatArray:
        """Return the cost factor of each rank for these taints: exp(−tanh(Σ weights)).

        O(ranks · taints).
        """
        sums = np.zeros(len(self.ranks))
        for taint, weight in preferred.items():
            sums += weight * mask_of(self._of_taint.get(taint, 0), len(sums))
        factors: FloatArray = np.exp(-np.tanh(sums))
        return factors

    def removed(self, eligible: Allowed) -> tuple[Removed, ...]:
        """Return the ranks that each filter removed, by filter. O(ranks)."""
        return tuple(Removed(name, tuple(self.named(bits))) for name, bits in eligible.struck)

    def named(self, bits: Bits) -> list[Rank]:
        """Return the ranks of a set, in order. O(ranks)."""
        return [self.ranks[index] for index in positions_of(bits, len(self.ranks)).tolist()]


def mask_of(bits: Bits, count: int) -> Mask:
    """Return a set of `count` ranks as a mask."""
    packed = np.frombuffer(bits.to_bytes(-(-count // 8), "little"), np.uint8)
    return np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)


def positions_of(bits: Bits, count: int) -> Positions:
    """Return the positions of the ranks in a set of `count` ranks, in order."""
    return np.flatnonzero(mask_of(bits, count))


def bits_of(mask: Mask) -> Bits:
    """Return a mask as a set."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def demands_something(request: SelectRequest) -> bool:
    """Return whether any filter applies to a request, apart from the busy filter.

    The session of a request that only hints at it removes no rank.
    """
    return (
        request.allowed_worker_ids is not None
        or request.excluded_worker_ids is not None
        or request.phase is not None
        or request.pinned_worker is not None
        or request.routing_constraints is not None
        or (request.affinity_target is not None and not request.session_is_hint)
        or request.lora_name is not None
    )


def demanded_target(request: SelectRequest) -> RankTarget | None:
    """Return the rank or worker that the session of a request demands, or None."""
    return None if request.session_is_hint else request.affinity_target


def eligible(
    pool: Pool,
    request: SelectRequest,
    constraints: RoutingConstraints,
    *,
    is_hard: bool,
    busy: Bits,
) -> Allowed:
    """Return the ranks that may serve a request.

    `constraints`: the request's, merged with those of its prefill worker. `is_hard`: a session
    stays on its rank even if that rank is busy; otherwise only while it is among the eligible
    ranks. A bound rank that is not in the pool is ignored. `busy`: ranks over a threshold.
    """
    target = demanded_target(request)
    bound = 0 if target is None else pool.target(target)
    left = pool.all
    struck: list[tuple[str, Bits]] = []
    for name, kept in _filters(pool, request, constraints, bound if is_hard else 0, busy):
        out = left & ~kept
        if out:
            struck.append((name, out))
            left &= kept
    if bound and not is_hard and left & bound:
        struck.append(("session_affinity", left & ~bound))
        left &= bound
    return Allowed(left, struck)


def taints_of(labels: WorkerLabels) -> frozenset[str]:
    """Return the taints of a worker with these labels; every domain of its topology is one."""
    places = (f"{TOPOLOGY}/{domain}={place}" for domain, place in labels.topology_domains.items())
    return frozenset((*labels.taints, *places))


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
    bound: Bits,
    busy: Bits,
) -> list[tuple[str, Bits]]:
    """Return each applicable filter and the ranks it lets pass, in order."""
    found: list[tuple[str, Bits]] = []
    if pool.have_prefill or request.phase == "prefill":
        found.append(("role", pool.for_phase(request.phase)))
    found += _named(pool, request)
    if constraints.required_taints:
        found.append(("required_taints", pool.with_taints(constraints.required_taints)))
    if request.lora_name is not None:
        found.append(("lora_name", pool.serving(request.lora_name)))
    if bound:
        found.append(("session_affinity", bound))
    if busy:
        found.append(("busy", ~busy))
    return found


def _named(pool: Pool, request: SelectRequest) -> list[tuple[str, Bits]]:
    """Return the filters by worker names in the request."""
    found: list[tuple[str, Bits]] = []
    if request.allowed_worker_ids is not None:
        found.append(("allowed_worker_ids", pool.of_workers(request.allowed_worker_ids)))
    if request.excluded_worker_ids:
        found.append(("excluded_worker_ids", ~pool.of_workers(request.excluded_worker_ids)))
    if request.pinned_worker is not None:
        found.append(("pinned_worker", pool.target(request.pinned_worker)))
    return found
