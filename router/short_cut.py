"""The short cut from a prompt to a rank, which nearly every request takes.

    ask for a rank only     ─▶ one kernel: tokens to costs ─▶ PlainPlacement
    ask for nothing special ─▶ the same                    ─▶ Placement
    anything else           ─▶ None: the general way, `Placer`

It comes to what the general way comes to, to the bit and to the same draw, by the same kernels.
There each stage can be timed, explained and told of by itself, in 50 functions of Python: at 512
tokens these took 16 µs of 24.
"""

import math
from collections.abc import Sequence
from random import Random

import numpy as np
from msgspec import Struct

from router._short_cut_kernel import place
from router.core_settings import CoreSettings
from router.indexer.base import IndexMode
from router.indexer.predictions import Predictions
from router.indexer.radix_tree import RadixTree
from router.indexer.trusted_index import TrustedIndex
from router.placement import Placement
from router.plain import PlainPlacement, PlainRequest
from router.protocol.requests import SelectRequest
from router.protocol.values import TIERS, HashArray, Identity, Rank, Scope
from router.scheduler._pick_kernel import nth_equal
from router.scheduler.candidates import Candidates, Positions
from router.scheduler.crowd import Crowd
from router.scheduler.filters import demands_something
from router.scheduler.gate import Gate, Passed
from router.scheduler.policies import Policies
from router.scheduler.predictive import Predictive
from router.scheduler.selector import Choice
from router.scheduler.terms import COLUMNS, NEW_BLOCKS, FloatArray, TermTable
from router.scheduler.weighing import Weighing
from router.sequence.hashing import TokenArray
from router.sequence.prompt import Prompt
from router.sequence.rank_table import RankTable
from router.sequence.tracker import Tracker
from router.sequence.tracking import Tracking

_TRACKING = Tracking()


class _Scene(Struct, frozen=True, eq=False):
    """What of a scope does not change with every request; `passed`: all of its candidates.

    `slot_of`: of each holder of the tree, `rank_of`. `tells_overlaps`: decisions may tell of more
    than the chosen rank's. `terms`, `costs`: scratch, of each candidate.
    """

    passed: Passed
    identity: Identity
    tree: RadixTree
    tree_address: int
    positions: Positions
    rank_of: Sequence[Rank]
    slot_of: Positions
    tells_overlaps: bool
    terms: FloatArray
    costs: FloatArray


class ShortCut:
    """Places prompts among all candidates of a scope. Reads what a core knows; owns scratch space
    alone, and the scopes as they were last seen.
    """

    __slots__ = (
        "_crowd",
        "_depths",
        "_gate",
        "_index",
        "_is_open",
        "_overlaps",
        "_policies",
        "_predictions",
        "_ranks",
        "_rng",
        "_scenes",
        "_settings",
        "_tracker",
        "_weighing",
        "_weights",
    )

    def __init__(
        self,
        settings: CoreSettings,
        index: TrustedIndex,
        predictions: Predictions,
        ranks: RankTable,
        tracker: Tracker,
        crowd: Crowd,
        gate: Gate,
        weighing: Weighing,
        policies: Policies,
        rng: Random,
    ) -> None:
        self._is_open = _is_open(settings)
        self._settings = policy = settings.policy
        self._index = index
        self._predictions = predictions
        self._ranks = ranks
        self._tracker = tracker
        self._crowd = crowd
        self._gate = gate
        self._weighing = weighing
        self._policies = policies
        self._rng = rng
        host, disk = policy.host_cache_hit_weight, policy.disk_cache_hit_weight
        remote = policy.shared_cache_multiplier
        self._weights = np.array([policy.delay_weight, host, disk, remote])
        self._overlaps, self._depths = np.zeros((0, TIERS)), np.zeros(0)
        self._scenes: dict[Scope, _Scene] = {}

    def place(
        self,
        request: SelectRequest,
        scope: Scope,
        prompt: Prompt,
        candidates: Candidates,
        now_s: float,
    ) -> Placement | None:
        """Choose among these, all candidates of a scope; None: not this way. O(tokens)."""
        if _is_special(request):
            return None
        tokens = prompt.unhashed
        scene = None if tokens is None else self._scene(scope, candidates)
        if scene is None or tokens is None:
            return None
        count, expected = len(candidates.ranks), request.expected_output_tokens
        terms, costs = np.empty((count, COLUMNS)), np.empty(count)
        index, hashes, rows = self._cheapest(
            scene, tokens, prompt.seed, expected, now_s, terms, costs
        )
        table = TermTable(scope, candidates.ranks, terms, len(tokens), expected, now_s)
        return Placement(
            Choice(index, table, costs, Predictive.name),
            candidates.workers[index],
            prompt.note_hashes(scene.identity, hashes),
            scene.tree.matches(rows),
            scene.passed,
            self._settings,
            _TRACKING,
        )

    def place_plain(
        self, request: PlainRequest, tokens: TokenArray, candidates: Candidates, now_s: float
    ) -> PlainPlacement | None:
        """The same for a request that asks for a rank only."""
        scene = self._scene(request.scope, candidates)
        if scene is None:
            return None
        terms, expected = scene.terms, request.expected_output_tokens
        index, _, rows = self._cheapest(
            scene, tokens, request.seed, expected, now_s, terms, scene.costs
        )
        return PlainPlacement(
            candidates.workers[index],
            candidates.ranks[index],
            terms[index].tolist(),
            len(tokens),
            Predictive.name,
            scene.tree.matches(rows) if scene.tells_overlaps else None,
        )

    def _cheapest(
        self,
        scene: _Scene,
        tokens: TokenArray,
        seed: int,
        expected_output_tokens: int | None,
        now_s: float,
        terms: FloatArray,
        costs: FloatArray,
    ) -> tuple[int, HashArray, int]:
        """Write terms and costs. Which candidate it is, the prompt's hashes, and how many matches
        the tree has written.
        """
        values, slots = self._ranks.values, scene.passed.candidates.slots
        if len(self._depths) != len(values):
            self._overlaps, self._depths = np.zeros((len(values), TIERS)), np.zeros(len(values))
        block_size, eagle = scene.identity.block_size, scene.identity.eagle
        hashes = np.empty(max(len(tokens) - eagle, 0) // block_size, np.uint64)
        first, ties, rows = place(
            scene.tree_address,
            tokens,
            block_size,
            block_size + eagle,
            seed,
            hashes,
            values,
            slots,
            scene.positions,
            scene.slot_of,
            self._overlaps,
            self._depths,
            math.nan if expected_output_tokens is None else expected_output_tokens,
            now_s,
            self._weights,
            terms,
            costs,
        )
        if self._tracker.write_depths(hashes, self._depths):
            terms[:, NEW_BLOCKS] -= self._depths[slots]
            self._depths[:] = 0.0
        return (
            first if ties == 1 else nth_equal(costs, first, self._rng.randrange(ties)),
            hashes,
            rows,
        )

    def _scene(self, scope: Scope, candidates: Candidates) -> _Scene | None:
        """What is known of a scope; None: nothing may go this way now."""
        if not self._is_open or self._tracker.growing or self._crowd.heard:
            return None
        if not self._gate.is_open(scope.model_name):
            return None
        scene = self._scenes.get(scope)
        if scene is None or scene.passed.candidates is not candidates:
            return self._look(scope, candidates)
        rank_of = scene.tree.rank_of
        if rank_of is not scene.rank_of or len(rank_of) != len(scene.slot_of):
            return self._look(scope, candidates)
        return scene

    def _look(self, scope: Scope, candidates: Candidates) -> _Scene | None:
        """A scope that has changed; None: it has no short cut."""
        self._scenes.pop(scope, None)
        index = self._predictions if self._predictions.are_made else self._index
        tree, policy = index.tree(scope), self._policies.find(scope.routing_group, None)
        if tree is None or len(candidates.identities) != 1 or type(policy) is not Predictive:
            return None
        if candidates.have_prefill:
            return None
        ((identity, positions),) = candidates.groups
        count, workers = len(candidates), candidates.workers
        scene = self._scenes[scope] = _Scene(
            Passed(candidates),
            identity,
            tree,
            tree.address,
            positions,
            tree.rank_of,
            self._weighing.slots_of(identity, tree.rank_of),
            any(worker.rank_count > 1 or worker.block_addresses for worker in workers),
            np.empty((count, COLUMNS)),
            np.empty(count),
        )
        return scene


def _is_open(settings: CoreSettings) -> bool:
    """Whether anything may go this way: what is known of caches has to be in one tree."""
    return (
        settings.tracking == _TRACKING
        and (settings.prediction is None or settings.mode is not IndexMode.EVENTS)
        and settings.naming.is_plain
        and settings.policy.router_temperature == 0
        and not settings.models_prefill
    )


def _is_special(request: SelectRequest) -> bool:
    return (
        request.router_config_override is not None
        or request.prefill_worker_id is not None
        or demands_something(request)
    )
