"""The ranks that may serve a request: the filters in order, and the thresholds of busy ranks.

A rank is preferred for a LoRA adapter that it has probably loaded: one of its latest requests'.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import mul

import numpy as np
from msgspec import Struct

from router.errors import KvRouterError
from router.protocol.catalogue import WorkerLabels
from router.protocol.replies import RemovedRanks
from router.protocol.requests import RankTarget, SelectRequest
from router.protocol.values import Rank, Scope
from router.scheduler.busy import NO_THRESHOLDS, BusyThresholds, Mask, busy_ranks
from router.scheduler.candidates import Candidates, Narrowing
from router.scheduler.errors import NoEndpointsError, WorkersOverloadedError
from router.scheduler.filters import (
    NO_CONSTRAINTS,
    Allowed,
    Bits,
    Pool,
    bits_of,
    demanded_target,
    demands_something,
    eligible,
    mask_of,
    merged,
    positions_of,
    transfer_constraints,
)
from router.scheduler.terms import FloatArray
from router.sequence.rank_table import RankTable


class LoadedLoras:
    """The latest adapters of each rank, up to the number that its engine keeps.

    Invariants: no rank is kept without adapters; an adapter is once in a rank's list, the last one
    served at its end.
    """

    __slots__ = ("_by_rank",)

    def __init__(self) -> None:
        self._by_rank: dict[Rank, list[str]] = {}

    def note(self, rank: Rank, lora_name: str, capacity: int) -> None:
        """Record a request for this adapter; the rank keeps `capacity` (1 or more). O(capacity)."""
        loaded = self._by_rank.setdefault(rank, [])
        if lora_name in loaded:
            loaded.remove(lora_name)
        loaded.append(lora_name)
        del loaded[:-capacity]

    def drop(self, rank: Rank) -> None:
        """Forget a rank."""
        self._by_rank.pop(rank, None)

    def having(self, ranks: Sequence[Rank], lora_name: str) -> Mask:
        """Return a mask of the ranks that have the adapter loaded. O(ranks)."""
        nothing: list[str] = []
        return np.array([lora_name in self._by_rank.get(each, nothing) for each in ranks], np.bool_)

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(adapters)."""
        for loaded in self._by_rank.values():
            assert len(set(loaded)) == len(loaded) > 0


NAMED_RANKS = 16
"""Number of removed ranks that an error names per filter."""


SESSION_HINT_FACTOR = 0.95
"""Cost factor of the rank that an inferred session was bound to.

What the cached prefix saves is in the costs already. The hint therefore decides only between ranks
whose costs differ by less than this, as they do before the events of the last answer have arrived.
"""

CACHED_RANKS = 16_384
"""Limit of the ranks in cached subsets of a scope's candidates, each of which counts for 16 more;
beyond it, the cache is emptied."""

_SUBSET_RANKS = 16


class EligibilitySettings(Struct, frozen=True):
    """The part of the configuration that the gate uses; see `PlacementConfig`."""

    thresholds: BusyThresholds = NO_THRESHOLDS
    hysteresis: float = 0.1
    is_affinity_hard: bool = True
    lora_affinity_weight: float = 0.0


class _Known:
    """Candidates of a scope, their pool, and recently used subsets of them.

    `_factors`: of the ranks of a subset, by the taints that a request prefers.
    """

    __slots__ = ("_cached_ranks", "_factors", "_narrowed", "_narrowing", "candidates", "pool")

    def __init__(self, candidates: Candidates) -> None:
        self.candidates = candidates
        self.pool = Pool(candidates.ranks, candidates.workers)
        self._narrowing = Narrowing(candidates)
        self._narrowed: dict[Bits, Candidates] = {}
        self._factors: dict[tuple[Bits, tuple[tuple[str, float], ...]], FloatArray] = {}
        self._cached_ranks = 0

    def only(self, kept: Bits) -> Candidates:
        """Return these candidates. O(candidates), if cached O(candidates / 64)."""
        if kept == self.pool.all:
            return self.candidates
        narrowed = self._narrowed.get(kept)
        if narrowed is None:
            narrowed = self._narrowing.only(positions_of(kept, len(self.candidates)))
            self._make_room(len(narrowed))
            self._narrowed[kept] = narrowed
        return narrowed

    def factors(self, kept: Bits, preferred: Mapping[str, float]) -> FloatArray:
        """Return the cost factors of these candidates. O(candidates · taints) unless cached."""
        key = (kept, tuple(preferred.items()))
        found = self._factors.get(key)
        if found is None:
            found = self.pool.factors(preferred)[mask_of(kept, len(self.candidates))]
            self._make_room(len(found) + len(preferred))
            self._factors[key] = found
        return found

    def hinted(self, kept: Bits, target: RankTarget) -> FloatArray:
        """Return the cost factors of these candidates for the hint at a session's rank.

        O(candidates).
        """
        bound = mask_of(self.pool.target(target) & kept, len(self.candidates))
        return np.where(bound, SESSION_HINT_FACTOR, 1.0)[mask_of(kept, len(self.candidates))]

    def _make_room(self, ranks: int) -> None:
        """Empty the cache if it is full, and count what is added to it."""
        if self._cached_ranks + ranks > CACHED_RANKS:
            self._narrowed, self._factors, self._cached_ranks = {}, {}, 0
        self._cached_ranks += ranks + _SUBSET_RANKS


class EligibleRanks(Struct, frozen=True, eq=False, gc=False):
    """Candidates that may serve a request, and their cost factors; None for no factors.

    `pool`, `found`: the source and result of the filtering; None if no filter applied.
    """

    candidates: Candidates
    factors: FloatArray | None = None
    pool: Pool | None = None
    found: Allowed | None = None

    @property
    def removed(self) -> list[RemovedRanks]:
        """The ranks that each filter removed, all by name. O(ranks)."""
        if self.pool is None or self.found is None:
            return []
        removed = self.pool.removed(self.found)
        return [removed_ranks(step.filter, step.ranks, len(step.ranks)) for step in removed]


class Eligibility:
    """Filters, and the thresholds above which a rank of a model is busy.

    Owns the column BUSY. A request without demands passes at once while no threshold is set.
    """

    __slots__ = ("_adapters", "_by_model", "_by_scope", "_settings", "_table")

    def __init__(self, settings: EligibilitySettings, table: RankTable) -> None:
        self._settings = settings
        self._table = table
        self._adapters = LoadedLoras()
        self._by_model: dict[str, BusyThresholds] = {}
        self._by_scope: dict[Scope, _Known] = {}

    def reconfigure(self, settings: EligibilitySettings) -> None:
        """Apply other settings; models keep thresholds of their own."""
        self._settings = settings

    def pass_through(
        self, request: SelectRequest, candidates: Candidates, prefill: WorkerLabels | None
    ) -> EligibleRanks:
        """Return which of these candidates, at least one, may serve a request.

        `prefill`: the labels of the worker that has computed the prompt. O(workers), and O(ranks)
        with a threshold set. Raises NoEndpointsError, WorkersOverloadedError.
        """
        thresholds, busy = self._settings.thresholds, 0
        if self._by_model:
            thresholds = self._by_model.get(request.model_name, thresholds)
        if thresholds != NO_THRESHOLDS:
            values, hysteresis = self._table.values, self._settings.hysteresis
            mask, count = busy_ranks(
                values, candidates.slots, thresholds, hysteresis, is_latched=True
            )
            busy = bits_of(mask) if count else 0
        is_plain = prefill is None and not (candidates.have_prefill or busy)
        has_hint = request.session_is_hint and request.affinity_target is not None
        if is_plain and not has_hint and not demands_something(request):
            return EligibleRanks(candidates)
        known = self._known(request.scope, candidates)
        pool = known.pool
        constraints = request.routing_constraints or NO_CONSTRAINTS
        if prefill is not None:
            constraints = merged(constraints, transfer_constraints(prefill))
        is_hard = self._settings.is_affinity_hard
        found = eligible(pool, request, constraints, is_hard=is_hard, busy=busy)
        if not found.kept:
            raise _refusal(request, pool, found)
        narrowed = known.only(found.kept)
        factors = self._factors(request, known, found.kept, constraints.preferred_taints)
        if narrowed is candidates:
            return EligibleRanks(candidates, factors)
        return EligibleRanks(narrowed, factors, pool, found)

    def thresholds(self, model_name: str) -> BusyThresholds:
        """Return the thresholds above which a rank of this model is busy."""
        return self._by_model.get(model_name, self._settings.thresholds)

    def set_thresholds(self, model_name: str, thresholds: BusyThresholds) -> None:
        """Set the thresholds of a model."""
        self._by_model[model_name] = thresholds

    @property
    def models(self) -> Iterable[str]:
        """The models with thresholds of their own."""
        return self._by_model

    def served(self, rank: Rank, lora_name: str, labels: WorkerLabels) -> None:
        """Record that a rank is sent a request for this adapter."""
        if self._settings.lora_affinity_weight:
            self._adapters.note(rank, lora_name, labels.max_gpu_lora_count or 1)

    def forget(self, rank: Rank) -> None:
        """Forget a rank and the adapters it had loaded."""
        self._adapters.drop(rank)

    def _factors(
        self, request: SelectRequest, known: _Known, kept: Bits, preferred: Mapping[str, float]
    ) -> FloatArray | None:
        """Return the product of the cost factors of these candidates; None if there are none."""
        found: list[FloatArray] = []
        if preferred:
            found.append(known.factors(kept, preferred))
        if request.lora_name is not None and self._settings.lora_affinity_weight:
            found.append(self._nearer(known.only(kept).ranks, request.lora_name))
        if request.session_is_hint and request.affinity_target is not None:
            found.append(known.hinted(kept, request.affinity_target))
        return reduce(mul, found) if found else None

    def _nearer(self, ranks: Sequence[Rank], lora_name: str) -> FloatArray:
        """Return the cost factors of ranks; a loaded adapter counts like a preferred taint."""
        weight = self._settings.lora_affinity_weight
        return np.where(self._adapters.having(ranks, lora_name), np.exp(-np.tanh(weight)), 1.0)

    def _known(self, scope: Scope, candidates: Candidates) -> _Known:
        known = self._by_scope.get(scope)
        if known is None or known.candidates is not candidates:
            known = self._by_scope[scope] = _Known(candidates)
        return known

    def busy(self, candidates: Candidates, thresholds: BusyThresholds) -> Mask:
        """Return a mask of the busy candidates. Mutates nothing. O(candidates)."""
        hysteresis = self._settings.hysteresis
        values, slots = self._table.values, candidates.slots
        return busy_ranks(values, slots, thresholds, hysteresis, is_latched=False)[0]


def _refusal(request: SelectRequest, pool: Pool, found: Allowed) -> KvRouterError:
    removed = [removed_ranks(step.filter, step.ranks) for step in pool.removed(found)]
    if found.last_filter == "busy":
        target = request.pinned_worker or demanded_target(request)
        only = target is not None and bool(pool.target(target) & found.struck[-1][1])
        return WorkersOverloadedError(target.worker_id if target and only else None, removed)
    reason = f"no worker is left by {found.last_filter}"
    return NoEndpointsError(request.model_name, request.routing_group, reason, removed)


def removed_ranks(reason: str, ranks: Sequence[Rank], named: int = NAMED_RANKS) -> RemovedRanks:
    """Return the ranks removed for this reason; the first `named` are listed by name."""
    return RemovedRanks(reason, len(ranks), [str(rank) for rank in ranks[:named]])
