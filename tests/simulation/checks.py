"""What must hold: at any moment of every answer called exact, and at the end of all."""

from random import Random

import numpy as np

from router.indexer.base import NO_OVERLAP
from router.protocol.replies import TrustState
from router.protocol.values import TIERS, Scope
from simulation.corpus import BLOCK_SIZE
from simulation.hybrid import resumed_blocks

STALE_S = 1.0
_SLACK_S = 1e-6
_SCOPE = Scope()


class Checker:
    """Compares routers with the truth. `failures`: what did not hold, in words."""

    def __init__(self, world):
        self._world = world
        self._random = world.random
        self._isl_random = Random(f"isl {world.scenario.seed}")
        self.failures = []
        self.answers = 0
        self.exact_answers = 0

    def check_answers(self):
        """Ask every router for a prompt, and hold what it calls exact against the truth."""
        prompt = self._random.choice(self._world.shared.corpus.prompts)
        hashes = np.array([node.sequence_hash for node in prompt], dtype=np.uint64)
        looks_closely = self._random.random() < 0.3
        self._check_edges()
        for router in list(self._world.routers.values()):
            router.check_alive()
            self._check_router(router, hashes, looks_closely)

    def differences(self):
        """What keeps every router from being exact and right about the present, in words."""
        return [
            text
            for router_id in range(1, self._world.scenario.routers + 1)
            for text in self._differences_of(self._world.routers.get(router_id), router_id)
        ]

    def _check_edges(self):
        for rank in self._world.ranks():
            problem = self._world.present_rank(rank).edge_problem()
            if problem is not None:
                self.failures.append(f"{self._world.loop.time():.3f} s: {problem}")

    def _check_router(self, router, hashes, looks_closely):
        core, now_s = router.core, self._world.loop.time()
        isl_tokens = len(hashes) * BLOCK_SIZE + self._isl_random.randrange(BLOCK_SIZE)
        overlaps = core.index.find_matches(_SCOPE, hashes)
        resumable = core.index.resumable(_SCOPE, hashes, isl_tokens, BLOCK_SIZE)
        held = _held(router) if looks_closely else None
        for rank in _known_ranks(core):
            trust = core.trust(rank, now_s)
            self.answers += 1
            if trust.state is not TrustState.EXACT:
                continue
            self.exact_answers += 1
            where = f"{now_s:.3f} s, router {router.router_id}, rank {rank}, event {trust.event_id}"
            life = self._world.truth.life(rank, core.index.incarnation(rank))
            then = None if life is None else life.as_of(trust.event_id)
            if then is None:
                self.failures.append(f"{where}: exact as of an event that no agent vouched for")
                continue
            superseded_s = life.superseded_s(trust.event_id)
            problems = [*self._time_problems(rank, then, superseded_s)]
            expected = _overlap(then, hashes)
            if tuple(_fields(overlaps.get(rank, NO_OVERLAP))) != expected:
                problems.append(f"the overlap is not {expected}")
            resumed = self._resumed_blocks(rank, then, hashes, isl_tokens, expected)
            if resumable.get(rank, NO_OVERLAP).device != resumed:
                problems.append(f"it does not resume {resumed} blocks of {isl_tokens} tokens")
            if held is not None and held.get(rank, set()) != then:
                problems.append(_difference(held.get(rank, set()), then))
            self.failures += [f"{where}: exact, but {each}" for each in problems]

    def _time_problems(self, rank, held, superseded_s):
        now_s = self._world.loop.time()
        if now_s - superseded_s > STALE_S + _SLACK_S:
            yield f"superseded since {superseded_s:.3f} s"
        if not self._world.present_rank(rank).has_held(held, now_s - STALE_S - _SLACK_S):
            yield "its engine has long moved on"

    def _resumed_blocks(self, rank, held, hashes, isl_tokens, overlap):
        model = self._world.scenario.model_of(rank.worker_id)
        if model is None:
            return overlap[0]
        return resumed_blocks(held, model.layout, hashes.tolist(), isl_tokens)

    def _differences_of(self, router, router_id):
        if router is None:
            yield f"router {router_id} is down"
            return
        core, now_s = router.core, self._world.loop.time()
        held = _held(router)
        expected = set(self._world.ranks())
        for rank in expected - set(_known_ranks(core)):
            yield f"end: router {router_id} does not know rank {rank}"
        for rank in set(held) - expected:
            yield f"end: router {router_id} holds blocks of {rank}, which no worker has"
        for rank in sorted(expected & set(_known_ranks(core))):
            trust = core.trust(rank, now_s)
            yield from self._differences_of_rank(router_id, rank, trust, held.get(rank, set()))

    def _differences_of_rank(self, router_id, rank, trust, held):
        """A rank whose agent has doubts may lack blocks, but has no ghosts if they can be known."""
        source = self._world.present_rank(rank)
        present = source.present()
        where = f"end: router {router_id}, rank {rank}"
        if source.doubts:
            if trust.state is not TrustState.DEGRADED:
                yield f"{where}: {trust.state}, not degraded, although there are doubts"
            if held - present and source.is_knowable():
                yield f"{where}: {_difference(held, present)}, and doubts {source.doubts}"
            return
        if trust.state is not TrustState.EXACT and (
            source.is_provable() or trust.state is not TrustState.LAGGING
        ):
            yield f"{where}: {trust.state}: {trust.reason}"
        if held != present and source.is_knowable():
            yield f"{where}: {_difference(held, present)}"


def _known_ranks(core):
    return [rank for worker in core.fleet for rank in worker.announcement.ranks]


def _held(router):
    """What the index shows, by rank, as pairs of tier, or of class, and sequence hash."""
    held = {}
    shown = [(int(each.tier), each) for _, each in router.core.dump()]
    for place, blocks in (*shown, *router.dumped_classes()):
        pairs = ((place, each) for each in blocks.sequence_hashes.tolist())
        held.setdefault(blocks.rank, set()).update(pairs)
    return held


def _fields(overlap):
    return (overlap.device, overlap.host, overlap.disk, overlap.remote)


def _overlap(held, hashes):
    """Leading blocks held in a tier or a faster one, as the definition says."""
    hashes = hashes.tolist()
    return tuple(
        next(
            (i for i, h in enumerate(hashes) if not any((t, h) in held for t in range(tier + 1))),
            len(hashes),
        )
        for tier in range(TIERS)
    )


def _difference(shown, true):
    return f"{len(shown - true)} ghosts, {len(true - shown)} lost of {len(true)} blocks"
