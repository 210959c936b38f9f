"""The path from a request to a rank.

fleet ─▶ schedulable candidates ─gate─▶ eligible ─weighing─▶ TermTable ─policy─▶ Placement
         laid out once per change             index, reservations, rates of each
"""

from collections.abc import Iterable
from random import Random

import numpy as np
from msgspec import Struct, to_builtins
from msgspec.structs import replace

from router.core.fleet import Fleet
from router.core.placement import Explained, Placement
from router.core.settings import CoreSettings
from router.errors import KvRouterError, WorkerNotFoundError
from router.indexer.base import OverlapScores
from router.indexer.predictions import Predictions
from router.indexer.trusted_index import TrustedIndex
from router.protocol.catalogue import WorkerAnnouncement, WorkerLabels
from router.protocol.replies import RemovedRanks
from router.protocol.requests import (
    ConfigOverride,
    PotentialLoadsRequest,
    ReserveRequest,
    SelectRequest,
)
from router.protocol.values import Phase, Rank, Scope
from router.scheduler.candidates import Candidates
from router.scheduler.eligibility import NAMED_RANKS, Eligibility, EligibleRanks, removed_ranks
from router.scheduler.errors import (
    NoEndpointsError,
    WorkersOverloadedError,
    suggested_retry_s,
)
from router.scheduler.herd import HerdEstimate
from router.scheduler.objectives import ObjectiveRules, Objectives, judge, limits
from router.scheduler.policy.predictive import Predictive, cost_weights, predicted_parts
from router.scheduler.policy.registry import Policies, builtin_policies
from router.scheduler.queue.policy_classes import PolicyClass
from router.scheduler.selector import Choice, Selector
from router.scheduler.settings import OBJECTIVES, PolicySettings
from router.scheduler.term_builder import SearchTable, TermBuilder, Wanted
from router.scheduler.terms import OVERLAP_DEVICE, FloatArray, TermTable
from router.sequence.active.footprint import TrackedParts
from router.sequence.active.promises import Promise
from router.sequence.active.prompt import HashedPrompt, Prompt
from router.sequence.active.stages import FIND, SCHEDULING
from router.sequence.active.tracker import Tracker
from router.sequence.rank_table import BLOCK_SIZE, PLACED_AT, RankTable


class _Scope(Struct, frozen=True, eq=False):
    """The schedulable ranks of a scope, and the trees with their blocks.

    Valid for these versions of the fleet and of the rank table.
    """

    fleet_version: int
    ranks_version: int
    candidates: Candidates
    search: SearchTable


class _Rules(Struct, frozen=True, eq=False):
    """The configuration as changed by a phase and by the overrides of a request.

    `weights`: of the costs of `predictive`.
    """

    settings: PolicySettings
    tracking: TrackedParts
    weights: FloatArray


MOST_RULES = 256
"""Limit of cached rules; at the limit, the cache is emptied."""


class Placer:
    """A selector of ranks; owns `gate`, and `policies` with their state."""

    __slots__ = (
        "_fleet",
        "_herd",
        "_index",
        "_objectives",
        "_placements",
        "_predictions",
        "_ranks",
        "_rng",
        "_rules",
        "_scopes",
        "_settings",
        "_term_builder",
        "_tracker",
        "gate",
        "policies",
    )

    def __init__(
        self,
        settings: CoreSettings,
        fleet: Fleet,
        index: TrustedIndex,
        predictions: Predictions,
        ranks: RankTable,
        tracker: Tracker,
        herd: HerdEstimate,
        objectives: ObjectiveRules,
        selectors: Iterable[Selector] | None,
        rng: Random,
    ) -> None:
        """Set up the placer; `selectors` None means the built-in policies.

        Raises ConfigError if the settings name a policy that is not among them.
        """
        self._settings = settings
        self._rules: dict[tuple[Phase | None, ConfigOverride | None], _Rules] = {}
        self._fleet = fleet
        self._index = index
        self._predictions = predictions
        self._ranks = ranks
        self._rng = rng
        self._objectives = objectives
        self.policies = Policies(
            builtin_policies() if selectors is None else selectors,
            settings.default_policy,
            settings.group_policies,
        )
        self._tracker = tracker
        self._herd = herd
        counts_output, models_prefill = settings.tracking.counts_output, settings.models_prefill
        self._term_builder = TermBuilder(
            ranks, tracker, counts_output=counts_output, models_prefill=models_prefill
        )
        self._scopes: dict[Scope, _Scope] = {}
        self._placements: dict[Scope, int] = {}
        self.gate = Eligibility(settings.gate, ranks)

    def reconfigure(self, settings: CoreSettings, objectives: ObjectiveRules) -> None:
        """Apply changed settings: policies, weights, the gate. Raises ConfigError; then none."""
        self.policies.assign(settings.default_policy, settings.group_policies)
        self._settings, self._objectives = settings, objectives
        self._rules.clear()
        self.gate.reconfigure(settings.gate)

    def place(
        self,
        request: SelectRequest,
        prompt: Prompt,
        now_s: float,
        waited_s: float = 0.0,
        rng: Random | None = None,
    ) -> Placement:
        """Choose a rank; only the state of policies and of the gate changes.

        `waited_s`: the request's time in the queue. `rng`: if not the core's own. Raises
        NoEndpointsError, WorkersOverloadedError, SloNotMetError.
        """
        scope, phase, override = request.scope, request.phase, request.router_config_override
        known, stages = self._scope(scope), prompt.stages
        passed = self._eligible(request, known.candidates)
        candidates = passed.candidates
        if stages is not None:
            stages.end(SCHEDULING)
        policy = self.policies.find(
            scope.routing_group, None if override is None else override.policy
        )
        rules = self._rules.get((phase, override)) or self._make_rules(phase, override)
        claims = self._herd.claims()
        weights = rules.weights if type(policy) is Predictive else None
        expected = request.expected_output_tokens
        tracking, factors = rules.tracking, passed.factors
        wanted = Wanted(scope, now_s, tracking, factors, phase, expected, claims, weights)
        asked = self._asked(request, prompt, now_s, waited_s)
        if asked is not None:
            wanted = self._with_limits(wanted, asked, rules.settings)
        table, found = self._term_builder.build(known.search, candidates, prompt, wanted)
        if stages is not None:
            stages.end(FIND)
        choice = policy.choose(table, rules.settings, rng or self._rng)
        worker = candidates.workers[choice.index]
        if choice.table is not table:  # the policy has left some out
            worker = candidates.worker_of(choice.table.ranks[choice.index])
        hashed, rows = prompt.by_identity[worker.identity], found[worker.identity]
        rank_of, settings = known.search.rank_of, rules.settings
        promise = None if asked is None else self._promised(asked, choice, settings)
        return Placement(choice, worker, hashed, passed, settings, tracking, rows, rank_of, promise)

    def _asked(
        self, request: SelectRequest, prompt: Prompt, now_s: float, waited_s: float
    ) -> Objectives | None:
        """Return the objectives of a request, or None."""
        has_own = request.slo_ttft_ms is not None or request.slo_tpot_ms is not None
        if not has_own and not self._objectives.has_defaults:
            return None

        def uncached_tokens() -> int:
            return prompt.isl_tokens - self.cached_tokens(request, prompt, now_s)

        return self._objectives.of(request, waited_s, uncached_tokens)

    def _with_limits(self, wanted: Wanted, asked: Objectives, settings: PolicySettings) -> Wanted:
        """Return what is wanted of a decision, with the objectives of its request."""
        most = limits(asked, self._tracker.promises.errors(asked.scope))
        weights = None if wanted.weights is None else cost_weights(settings, *most)
        return replace(wanted, weights=weights, most_ttft_s=most[0], most_tpot_s=most[1])

    def _promised(self, asked: Objectives, choice: Choice, settings: PolicySettings) -> Promise:
        """Return what a placed request is promised. Raises SloNotMetError."""
        promises = self._tracker.promises
        uses = self.policies.find_named(choice.policy).uses
        may_refuse = uses is not None and not set(OBJECTIVES).isdisjoint(uses)
        may_refuse = may_refuse and not promises.is_trial_due(asked.scope)
        predicted_s = predicted_parts(choice.table, settings)
        errors = promises.errors(asked.scope)
        return judge(asked, choice, predicted_s, errors, may_refuse=may_refuse)

    def note_placed(self, scope: Scope, rank: Rank) -> None:
        """Record that a rank was given a request, as its scope's last placement so far."""
        placements = self._placements[scope] = self._placements.get(scope, 1) + 1
        self._ranks.row(rank)[PLACED_AT] = placements

    def explain(self, request: SelectRequest, placement: Placement) -> Explained:
        """Return the reasons of a placement, from the state at that time. O(candidates)."""
        table, settings = placement.choice.table, placement.settings
        removed = [*self._unschedulable(request.scope, named=None), *placement.passed.removed]
        left_out = set(placement.passed.candidates.ranks).difference(table.ranks)
        if left_out:
            policy = f"policy {placement.choice.policy}"
            removed.append(removed_ranks(policy, sorted(left_out), len(left_out)))
        reasons = self._selector(request).explain(placement.choice, settings)
        predicted_s = predicted_parts(table, settings)
        return Explained(reasons, to_builtins(settings), predicted_s, removed)

    def schedulable(self, scope: Scope) -> Candidates:
        """Return all schedulable ranks of a scope; computed once per change of the fleet."""
        return self._scope(scope).candidates

    def eligible(self, request: SelectRequest) -> EligibleRanks:
        """Return the ranks that may serve it. Raises NoEndpointsError, WorkersOverloadedError."""
        return self._eligible(request, self.schedulable(request.scope))

    def no_workers(self, scope: Scope, waited_s: float | None = None) -> NoEndpointsError:
        """Return the error of a scope without a schedulable worker, of which each is explained.

        `waited_s`: how long a request has waited for one, after which it may be sent again.
        """
        after = "" if waited_s is None else f" within {waited_s:.3g} s"
        retry_s = None if waited_s is None else suggested_retry_s(waited_s)
        named = (scope.model_name, scope.routing_group, f"no schedulable workers{after}")
        return NoEndpointsError(*named, self._unschedulable(scope), retry_s)

    def _eligible(self, request: SelectRequest, candidates: Candidates) -> EligibleRanks:
        if not candidates.ranks:
            raise self.no_workers(request.scope)
        prefill = request.prefill_worker_id
        labels = None if prefill is None else self._labels(prefill)
        return self.gate.pass_through(request, candidates, labels)

    def has_room(
        self, request: SelectRequest, policy_class: PolicyClass, part: float, now_s: float
    ) -> bool:
        """Return whether a rank that may serve a request is not busy, by `part` of the threshold.

        Returns True if no rank can ever serve it: the request then leaves the queue with an error.
        """
        try:
            candidates = self.eligible(request).candidates
        except WorkersOverloadedError:
            return False
        except KvRouterError:
            return True
        values, slots = self._ranks.values, candidates.slots
        if policy_class.has_room(values, slots, part):
            return True
        if not self._settings.models_prefill:
            return False
        rows = values[slots]  # what was computed since makes room
        self._tracker.subtract_progress(rows, slots, now_s)
        return policy_class.has_room(rows, np.arange(len(rows)), part)

    def cached_tokens(self, request: SelectRequest, prompt: Prompt, now_s: float) -> int:
        """Return the cached tokens of a prompt on the eligible rank that has most of them.

        Raises NoEndpointsError, WorkersOverloadedError.
        """
        scope = request.scope
        known, wanted = self._scope(scope), Wanted(scope, now_s, self._settings.tracking)
        candidates = self._eligible(request, known.candidates).candidates
        table = self._term_builder.build(known.search, candidates, prompt, wanted)[0]
        cached_tokens = table.column(OVERLAP_DEVICE) * table.column(BLOCK_SIZE)
        return min(prompt.isl_tokens, int(cached_tokens.max()))

    def weigh(self, request: PotentialLoadsRequest, prompt: Prompt, now_s: float) -> TermTable:
        """Return the terms of every schedulable rank of a scope, which may be none."""
        scope = request.scope
        known, wanted = self._scope(scope), Wanted(scope, now_s, self.tracking(request))
        for identity in known.candidates.identities:
            self._index.note_search(scope, prompt.hashed(identity).sequence_hashes)
        return self._term_builder.build(known.search, known.candidates, prompt, wanted)[0]

    def overlaps(self, scope: Scope, prompt: HashedPrompt) -> OverlapScores:
        """Return the cached prefix of every rank of a scope, estimated blocks included."""
        known = self._index.find_matches(scope, prompt.sequence_hashes)
        if not self._predictions.are_made:
            return known
        return self._predictions.added_to(known, scope, prompt.sequence_hashes)

    def resumable(self, scope: Scope, prompt: HashedPrompt) -> OverlapScores:
        """Return the `overlaps`, cut on hybrid ranks to where the prompt can be resumed."""
        hashes = prompt.sequence_hashes
        known = self._index.resumable(scope, hashes, prompt.isl_tokens, prompt.block_size)
        if not self._predictions.are_made:
            return known
        return self._predictions.added_to(known, scope, hashes)

    def find_worker(self, scope: Scope, rank: Rank) -> WorkerAnnouncement:
        """Return the worker of a schedulable rank. Raises WorkerNotFoundError."""
        worker = self._fleet.get(rank.worker_id)
        if worker is not None and self._fleet.is_schedulable(worker):
            announced = worker.announcement
            if announced.scope == scope and rank in announced.ranks:
                return announced
        detail = f"with a schedulable dp_rank {rank.dp_rank} for model={scope.model_name} "
        raise WorkerNotFoundError(rank.worker_id, detail + f"routing_group={scope.routing_group}")

    def tracking(
        self, request: SelectRequest | ReserveRequest | PotentialLoadsRequest
    ) -> TrackedParts:
        """Return the parts of a prompt that count as load where it is booked."""
        phase = None if isinstance(request, PotentialLoadsRequest) else request.phase
        override = request.router_config_override
        return (self._rules.get((phase, override)) or self._make_rules(phase, override)).tracking

    def _make_rules(self, phase: Phase | None, override: ConfigOverride | None) -> _Rules:
        settings = self._settings.policy.of_phase(phase).overridden(override)
        tracking = self._settings.tracking.of_phase(phase).overridden(override)
        if len(self._rules) >= MOST_RULES:
            self._rules.clear()
        rules = _Rules(settings, tracking, cost_weights(settings))
        self._rules[phase, override] = rules
        return rules

    def _scope(self, scope: Scope) -> _Scope:
        """Return what is known of a scope, laid out anew after changes."""
        fleet_version, ranks_version = self._fleet.version, self._ranks.version
        trees = self._index.trees(scope)
        if self._predictions.are_made:
            trees = (*trees, *self._predictions.trees(scope))
        known = self._scopes.get(scope)
        if (
            known is not None
            and known.fleet_version == fleet_version
            and known.ranks_version == ranks_version
        ):
            if known.search.fits(trees):
                return known
            candidates = known.candidates
        else:
            candidates = Candidates.of(self._fleet.schedulable(scope), self._ranks)
            if candidates.ranks:
                self._start_turns(scope, candidates)
        known = _Scope(fleet_version, ranks_version, candidates, SearchTable(trees, self._ranks))
        if candidates.ranks:
            self._scopes[scope] = known
        else:
            self._scopes.pop(scope, None)
            self._placements.pop(scope, None)
        return known

    def _start_turns(self, scope: Scope, candidates: Candidates) -> None:
        """Let the placements that pass over a new rank, which has number 0, count from now on."""
        rows, slots = self._ranks.values, candidates.slots
        placed_at = rows[slots, PLACED_AT]
        last = max(self._placements.get(scope, 1), int(placed_at.max()))
        rows[slots[placed_at == 0], PLACED_AT] = self._placements[scope] = last

    def _selector(self, request: SelectRequest) -> Selector:
        override = request.router_config_override
        wanted = None if override is None else override.policy
        return self.policies.find(request.routing_group, wanted)

    def _unschedulable(self, scope: Scope, named: int | None = NAMED_RANKS) -> list[RemovedRanks]:
        """Return why workers are not schedulable; `named`: limit of ranks per reason, None: all."""
        why: dict[str, list[Rank]] = {}
        here = self._fleet.scopes().get(scope)
        for worker in () if here is None else here.unschedulable:
            reason = f"not schedulable ({self._fleet.obstacle(worker)})"
            why.setdefault(reason, []).extend(worker.ranks)
        return [
            removed_ranks(reason, ranks, len(ranks) if named is None else named)
            for reason, ranks in why.items()
        ]

    def _labels(self, prefill_worker_id: int) -> WorkerLabels:
        """Return the labels of the worker that did the prefill. Raises WorkerNotFoundError."""
        worker = self._fleet.get(prefill_worker_id)
        if worker is None:
            raise WorkerNotFoundError(prefill_worker_id, "named as prefill_worker_id")
        return worker.announcement.labels
