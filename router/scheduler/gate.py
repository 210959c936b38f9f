"""Who of a scope's candidates may serve one request: filters over the fleet as it is now."""

from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from router.errors import KvRouterError
from router.placement_errors import NoEndpointsError, RemovedRanks, WorkersOverloadedError
from router.protocol.catalogue import WorkerLabels
from router.protocol.requests import RoutingConstraints, SelectRequest
from router.protocol.values import Rank, Scope
from router.scheduler.adapters import LoadedAdapters
from router.scheduler.busy import NO_THRESHOLDS, BusyThresholds, Mask, busy_ranks
from router.scheduler.candidates import Candidates, Narrowing
from router.scheduler.filters import (
    NO_CONSTRAINTS,
    Eligible,
    Pool,
    demands_something,
    eligible,
    merged,
    transfer_constraints,
)
from router.scheduler.terms import FloatArray
from router.sequence.rank_table import RankTable

NAMED_RANKS = 16
"""Of the ranks that a filter removed, an error names so many."""


NARROWED_LIMIT = 64
"""Selections of candidates that are remembered for a scope; beyond, all are forgotten."""


class GateSettings(Struct, frozen=True):
    """What the gate needs to know of the configuration; see `PlacementConfig`."""

    thresholds: BusyThresholds = NO_THRESHOLDS
    hysteresis: float = 0.1
    is_affinity_hard: bool = True
    lora_affinity_weight: float = 0.0


class _Known:
    """Candidates of a scope, their pool, and those among them that were asked for of late.

    `less_busy`: who passed while these were busy, by their mask.
    """

    __slots__ = ("_narrowed", "_narrowing", "candidates", "less_busy", "pool")

    def __init__(self, candidates: Candidates) -> None:
        self.candidates = candidates
        self.pool = Pool(candidates.ranks, candidates.workers)
        self._narrowing = Narrowing(candidates)
        self._narrowed: dict[bytes, Candidates] = {}
        self.less_busy: dict[bytes, Passed] = {}

    def only(self, mask: Mask) -> Candidates:
        """Those in the mask. O(ranks / 64) where they are known, else O(ranks)."""
        key = np.packbits(mask).tobytes()
        narrowed = self._narrowed.get(key)
        if narrowed is None:
            if len(self._narrowed) >= NARROWED_LIMIT:
                self._narrowed.clear()
            narrowed = self._narrowed[key] = self._narrowing.only(mask)
        return narrowed


class Passed(Struct, frozen=True, eq=False):
    """Who may serve a request; what their costs are multiplied by, None for nothing.

    `pool`, `found`: what they were filtered from, and how; None where nothing was.
    """

    candidates: Candidates
    factors: FloatArray | None = None
    pool: Pool | None = None
    found: Eligible | None = None

    @property
    def removed(self) -> list[RemovedRanks]:
        """Whom each filter removed, every rank named. O(ranks)."""
        if self.pool is None or self.found is None:
            return []
        removed = self.pool.removed(self.found)
        return [removed_ranks(step.filter, step.ranks, len(step.ranks)) for step in removed]


class Gate:
    """Filters, and the thresholds above which a rank of a model is busy.

    It owns the column BUSY. A request without demands passes at once while no threshold is set.
    """

    __slots__ = ("_adapters", "_by_model", "_by_scope", "_settings", "_table")

    def __init__(self, settings: GateSettings, table: RankTable) -> None:
        self._settings = settings
        self._table = table
        self._adapters = LoadedAdapters()
        self._by_model: dict[str, BusyThresholds] = {}
        self._by_scope: dict[Scope, _Known] = {}

    def pass_through(
        self, request: SelectRequest, candidates: Candidates, prefill: WorkerLabels | None
    ) -> Passed:
        """Who of these, at least one, may serve a request. `prefill`: the labels of the worker
        that has computed its prompt. O(workers), and O(ranks) with a threshold set.

        Raises NoEndpointsError, WorkersOverloadedError.
        """
        thresholds, busy, busy_count = self.thresholds(request.model_name), None, 0
        if thresholds.are_set:
            values, hysteresis = self._table.values, self._settings.hysteresis
            busy, busy_count = busy_ranks(
                values, candidates.slots, thresholds, hysteresis, is_latched=True
            )
        is_plain = prefill is None and not candidates.have_prefill
        if is_plain and not demands_something(request):
            if busy is None or not busy_count:
                return Passed(candidates)
            return self._less_busy(request, candidates, busy, busy_count)
        known = self._known(request.scope, candidates)
        pool = known.pool
        constraints = request.routing_constraints or NO_CONSTRAINTS
        if prefill is not None:
            constraints = merged(constraints, transfer_constraints(prefill))
        is_hard = self._settings.is_affinity_hard
        found = eligible(pool, request, constraints, is_hard=is_hard, busy=busy)
        if not found.mask.any():
            raise _refusal(request, pool, found)
        factors = self._factors(pool, request, constraints)
        if found.mask.all():
            return Passed(candidates, factors)
        factors = None if factors is None else factors[found.mask]
        return Passed(known.only(found.mask), factors, pool, found)

    def is_open(self, model_name: str) -> bool:
        """Whether everybody passes who demands nothing."""
        return self._by_model.get(model_name, self._settings.thresholds) == NO_THRESHOLDS

    def thresholds(self, model_name: str) -> BusyThresholds:
        """Above what a rank of this model is busy."""
        return self._by_model.get(model_name, self._settings.thresholds)

    def set_thresholds(self, model_name: str, thresholds: BusyThresholds) -> None:
        """From now on these are the model's."""
        self._by_model[model_name] = thresholds

    @property
    def models(self) -> Iterable[str]:
        """Models with thresholds of their own."""
        return self._by_model

    def served(self, rank: Rank, lora_name: str, labels: WorkerLabels) -> None:
        """A rank is sent a request for this adapter."""
        if self._settings.lora_affinity_weight:
            self._adapters.note(rank, lora_name, labels.max_gpu_lora_count or 1)

    def forget(self, rank: Rank) -> None:
        """A rank is gone, and what it had loaded."""
        self._adapters.drop(rank)

    def _factors(
        self, pool: Pool, request: SelectRequest, constraints: RoutingConstraints
    ) -> FloatArray | None:
        """What costs are multiplied by. A loaded adapter is preferred as a taint would be."""
        preferred, weight = constraints.preferred_taints, self._settings.lora_affinity_weight
        factors = pool.factors(preferred) if preferred else None
        if request.lora_name is None or not weight:
            return factors
        loaded = self._adapters.having(pool.ranks, request.lora_name)
        nearer = np.where(loaded, np.exp(-np.tanh(weight)), 1.0)
        return nearer if factors is None else factors * nearer

    def _known(self, scope: Scope, candidates: Candidates) -> _Known:
        known = self._by_scope.get(scope)
        if known is None or known.candidates is not candidates:
            known = self._by_scope[scope] = _Known(candidates)
        return known

    def busy(self, candidates: Candidates, thresholds: BusyThresholds) -> Mask:
        """Who of these is busy now. Mutates nothing. O(candidates)."""
        hysteresis = self._settings.hysteresis
        values, slots = self._table.values, candidates.slots
        return busy_ranks(values, slots, thresholds, hysteresis, is_latched=False)[0]

    def _less_busy(
        self, request: SelectRequest, candidates: Candidates, busy: Mask, busy_count: int
    ) -> Passed:
        """Those that are not busy, for a request without other demands."""
        known = self._known(request.scope, candidates)
        passed = known.less_busy.get(key := busy.tobytes())
        if passed is None:
            found = Eligible(~busy, (("busy", busy),))
            if busy_count == len(busy):
                raise _refusal(request, known.pool, found)
            if len(known.less_busy) >= NARROWED_LIMIT:
                known.less_busy.clear()
            passed = known.less_busy[key] = Passed(known.only(found.mask), None, known.pool, found)
        return passed


def _refusal(request: SelectRequest, pool: Pool, found: Eligible) -> KvRouterError:
    removed = [removed_ranks(step.filter, step.ranks) for step in pool.removed(found)]
    if found.last_filter == "busy":
        target = request.pinned_worker or request.affinity_target
        only = target is not None and bool((pool.target(target) & found.struck[-1][1]).any())
        return WorkersOverloadedError(target.worker_id if target and only else None, removed)
    reason = f"no worker is left by {found.last_filter}"
    return NoEndpointsError(request.model_name, request.routing_group, reason, removed)


def removed_ranks(reason: str, ranks: Sequence[Rank], named: int = NAMED_RANKS) -> RemovedRanks:
    """Ranks that were removed for this reason; so many of them are named."""
    return RemovedRanks(reason, len(ranks), [str(rank) for rank in ranks[:named]])
