"""From a request to a rank.

fleet ─▶ schedulable candidates ─gate─▶ eligible ─weighing─▶ TermTable ─policy─▶ Placement
         laid out once for each change        index, bookings, rates of each
"""

from collections.abc import Iterable, Mapping
from random import Random

import numpy as np
from msgspec import to_builtins
from msgspec.structs import replace

from router.core_settings import CoreSettings
from router.errors import KvRouterError, WorkerNotFoundError
from router.fleet import Fleet
from router.indexer.base import OverlapScores
from router.indexer.predictions import Predictions
from router.indexer.trusted_index import TrustedIndex
from router.placement import Explained, Placement
from router.placement_errors import NoEndpointsError, RemovedRanks, WorkersOverloadedError
from router.protocol.catalogue import WorkerAnnouncement, WorkerLabels
from router.protocol.requests import PromptRequest, ReserveRequest, SelectRequest
from router.protocol.values import Identity, Rank, Scope
from router.scheduler._growth_kernel import grow
from router.scheduler.busy import step_tokens
from router.scheduler.candidates import Candidates
from router.scheduler.crowd import Crowd
from router.scheduler.gate import NAMED_RANKS, Gate, Passed, removed_ranks
from router.scheduler.policies import Policies, builtin_policies
from router.scheduler.policy_classes import PolicyClass
from router.scheduler.predictive import predicted_parts
from router.scheduler.prefill_load import model_progress
from router.scheduler.selector import Selector
from router.scheduler.terms import NEW_BLOCKS, OVERLAP_DEVICE, TAINT_FACTOR, TermTable
from router.scheduler.weighing import Weighing
from router.sequence.prompt import HashedPrompt, Prompt
from router.sequence.rank_table import (
    BLOCK_SIZE,
    DECODE_BLOCKS,
    DECODE_SIDE,
    MAX_BATCHED_TOKENS,
    QUEUED_TOKENS,
    RankTable,
)
from router.sequence.stages import FIND, SCHEDULING
from router.sequence.tracker import Tracker
from router.sequence.tracking import Tracking
from router.short_cut import ShortCut


class Placer:
    """Reads what a core knows; owns `gate`, `short_cut`, and policies with what they remember."""

    __slots__ = (
        "_candidates",
        "_crowd",
        "_fleet",
        "_index",
        "_policies",
        "_predictions",
        "_ranks",
        "_rng",
        "_settings",
        "_tracker",
        "_weighing",
        "gate",
        "short_cut",
    )

    def __init__(
        self,
        settings: CoreSettings,
        fleet: Fleet,
        index: TrustedIndex,
        predictions: Predictions,
        ranks: RankTable,
        tracker: Tracker,
        crowd: Crowd,
        selectors: Iterable[Selector] | None,
        rng: Random,
    ) -> None:
        """`selectors`: who may be asked to choose; None: those that come with the router. Raises
        ConfigError where the settings name another one.
        """
        self._settings = settings
        self._fleet = fleet
        self._index = index
        self._predictions = predictions
        self._ranks = ranks
        self._rng = rng
        self._policies = Policies(
            builtin_policies() if selectors is None else selectors,
            settings.default_policy,
            settings.group_policies,
        )
        self._tracker = tracker
        self._crowd = crowd
        self._weighing = Weighing(ranks, tracker)
        self._candidates: dict[Scope, tuple[int, int, Candidates]] = {}
        self.gate = gate = Gate(settings.gate, ranks)
        known = (index, predictions, ranks, tracker, crowd)
        parts = (gate, self._weighing, self._policies, rng)
        self.short_cut = ShortCut(settings, *known, *parts)

    def place(self, request: SelectRequest, prompt: Prompt, now_s: float) -> Placement:
        """Choose a rank; what policies and the gate remember is all that changes.

        Raises NoEndpointsError, WorkersOverloadedError.
        """
        scope, override = request.scope, request.router_config_override
        schedulable = self.schedulable(scope)
        placed = self.short_cut.place(request, scope, prompt, schedulable, now_s)
        if placed is not None:
            return placed
        passed = self._eligible(request, schedulable)
        candidates = passed.candidates
        stages = prompt.stages
        if stages is not None:
            stages.end(SCHEDULING)
        overlaps = self._find(scope, prompt, candidates)
        if stages is not None:
            stages.end(FIND)
        tracking, expected_tokens = self.tracking(request), request.expected_output_tokens
        table = self._weigh(request, prompt, candidates, overlaps, expected_tokens, tracking, now_s)
        if passed.factors is not None:
            table.column(TAINT_FACTOR)[:] = passed.factors
        if (claims := self._crowd.claims(now_s)) is not None:
            table = replace(table, claims=claims)
        if request.phase is not None:
            table.column(DECODE_SIDE)[:] = request.phase == "decode"
        settings = self._settings.policy.of_phase(request.phase)
        if override is not None:
            settings = settings.overridden(override)
        choice = self._selector(request).choose(table, settings, self._rng)
        worker = candidates.worker_of(choice.table.ranks[choice.index])
        hashed = prompt.hashed(worker.identity)
        found = overlaps[worker.identity]
        return Placement(choice, worker, hashed, found, passed, settings, tracking)

    def explain(self, request: SelectRequest, placement: Placement) -> Explained:
        """Why a request was placed there, by all that was known then. O(candidates)."""
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
        """Every rank of a scope that may be chosen; laid out once for each change of the fleet."""
        fleet_version, slots_version = self._fleet.version, self._ranks.version
        known = self._candidates.get(scope)
        if known is not None and known[0] == fleet_version and known[1] == slots_version:
            return known[2]
        workers = self._fleet.schedulable(scope)
        candidates = Candidates.of(workers, self._ranks)
        if workers:
            self._candidates[scope] = (fleet_version, slots_version, candidates)
        else:
            self._candidates.pop(scope, None)
        return candidates

    def eligible(self, request: SelectRequest) -> Passed:
        """Who may serve a request. Raises NoEndpointsError, WorkersOverloadedError."""
        return self._eligible(request, self.schedulable(request.scope))

    def _eligible(self, request: SelectRequest, candidates: Candidates) -> Passed:
        if not candidates.ranks:
            raise NoEndpointsError(
                request.model_name,
                request.routing_group,
                "no schedulable workers",
                self._unschedulable(request.scope),
            )
        return self.gate.pass_through(request, candidates, self._prefill_labels(request))

    def has_room(
        self, request: SelectRequest, policy_class: PolicyClass, part: float, now_s: float
    ) -> bool:
        """Whether not all that may serve a request are busy: above this part of the threshold.

        With nobody left to serve it ever, it has its turn, to be told so.
        """
        try:
            candidates = self.eligible(request).candidates
        except WorkersOverloadedError:
            return False
        except KvRouterError:
            return True
        rows = self._ranks.values[candidates.slots]
        if self._settings.models_prefill:
            model_progress(rows, candidates.ranks, now_s, self._tracker.active)
        most_tokens = step_tokens(rows[:, MAX_BATCHED_TOKENS])
        busy = policy_class.are_busy(rows[:, QUEUED_TOKENS], most_tokens, part)
        return not busy.all()

    def cached_tokens(self, request: SelectRequest, prompt: Prompt, now_s: float) -> int:
        """Tokens of a prompt that are cached where most are, of all that may serve it.

        Raises NoEndpointsError, WorkersOverloadedError.
        """
        candidates = self.eligible(request).candidates
        table = self._weighed(request, prompt, candidates, now_s)
        cached_tokens = table.column(OVERLAP_DEVICE) * table.column(BLOCK_SIZE)
        return min(prompt.isl_tokens, int(cached_tokens.max()))

    def weigh(self, request: PromptRequest, prompt: Prompt, now_s: float) -> TermTable:
        """Terms of every rank of a scope that may be chosen; there may be none."""
        return self._weighed(request, prompt, self.schedulable(request.scope), now_s)

    def overlaps(self, scope: Scope, prompt: HashedPrompt) -> OverlapScores:
        """The cached prefix of every rank of a scope, guesses included."""
        known = self._index.find_matches(scope, prompt.sequence_hashes)
        if not self._predictions.are_made:
            return known
        return self._predictions.added_to(known, scope, prompt.sequence_hashes)

    def find_worker(self, scope: Scope, rank: Rank) -> WorkerAnnouncement:
        """The worker of a rank that may be chosen. Raises WorkerNotFoundError."""
        worker = self._fleet.get(rank.worker_id)
        if worker is not None and self._fleet.is_schedulable(worker):
            announced = worker.announcement
            if announced.scope == scope and rank in announced.ranks:
                return announced
        detail = f"with a schedulable dp_rank {rank.dp_rank} for model={scope.model_name} "
        raise WorkerNotFoundError(rank.worker_id, detail + f"routing_group={scope.routing_group}")

    def tracking(self, request: SelectRequest | ReserveRequest) -> Tracking:
        """What of a booking is counted."""
        tracking, override = self._settings.tracking, request.router_config_override
        if request.phase is not None:
            tracking = tracking.of_phase(request.phase)
        return tracking if override is None else tracking.overridden(override)

    def _find(
        self, scope: Scope, prompt: Prompt, candidates: Candidates
    ) -> dict[Identity, OverlapScores]:
        find, hashed = self.overlaps, prompt.hashed
        return {identity: find(scope, hashed(identity)) for identity in candidates.identities}

    def _weighed(
        self, request: PromptRequest, prompt: Prompt, candidates: Candidates, now_s: float
    ) -> TermTable:
        overlaps, tracking = self._find(request.scope, prompt, candidates), self._settings.tracking
        return self._weigh(request, prompt, candidates, overlaps, None, tracking, now_s)

    def _weigh(
        self,
        request: PromptRequest,
        prompt: Prompt,
        candidates: Candidates,
        overlaps: Mapping[Identity, OverlapScores],
        expected_output_tokens: int | None,
        tracking: Tracking,
        now_s: float,
    ) -> TermTable:
        table = self._weighing.weigh(
            request, prompt, candidates, overlaps, expected_output_tokens, now_s
        )
        if self._tracker.growing:
            grow(table.values, now_s, self._settings.tracking.counts_output)
        if not tracking.active_blocks:
            table.column(DECODE_BLOCKS)[:] = np.nan
        elif not tracking.kv_reuse:
            table.column(NEW_BLOCKS)[:] = np.ceil(prompt.isl_tokens / table.column(BLOCK_SIZE))
        if self._settings.models_prefill:
            model_progress(table.values, table.ranks, now_s, self._tracker.active)
        return table

    def _selector(self, request: SelectRequest) -> Selector:
        override = request.router_config_override
        wanted = None if override is None else override.policy
        return self._policies.find(request.routing_group, wanted)

    def _unschedulable(self, scope: Scope, named: int | None = NAMED_RANKS) -> list[RemovedRanks]:
        """Why each worker of a scope may not be chosen; `named`: so many ranks, None: all."""
        why: dict[str, list[Rank]] = {}
        for worker in self._fleet:
            if worker.announcement.scope == scope:
                if self._fleet.is_schedulable(worker):
                    continue
                reason = f"not schedulable ({self._fleet.obstacle(worker)})"
                why.setdefault(reason, []).extend(worker.announcement.ranks)
        return [
            removed_ranks(reason, ranks, len(ranks) if named is None else named)
            for reason, ranks in why.items()
        ]

    def _prefill_labels(self, request: SelectRequest) -> WorkerLabels | None:
        """Of the worker that has computed a prompt. Raises WorkerNotFoundError."""
        if request.prefill_worker_id is None:
            return None
        worker = self._fleet.get(request.prefill_worker_id)
        if worker is None:
            raise WorkerNotFoundError(request.prefill_worker_id, "named as prefill_worker_id")
        return worker.announcement.labels
