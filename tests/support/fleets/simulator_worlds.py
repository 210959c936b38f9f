"""Traces and fleets for tests of the simulator, small."""

from itertools import count
from random import Random

from router.core.core import RouterCore
from router.indexer.radix_tree.radix_tree import RadixTree
from router.scheduler.settings import PolicySettings
from router.sequence.hashing.block_hashes import chain
from router.simulator.engine_model import llama_8b
from router.simulator.scenario import Scenario
from router.simulator.traces import Trace, TraceRequest
from support.values.builders import settings


def hashes_of(family, blocks):
    """Prompts of one family share all of the shorter one's blocks."""
    return chain([family * 1_000_003 + block for block in range(blocks)]).tolist()


def small_trace(requests=120, *, gap_s=0.05, families=6, seed=1, block_size=16):
    rng, now_s, made = Random(seed), 0.0, []
    for _ in range(requests):
        now_s += rng.expovariate(1 / gap_s)
        isl, osl = rng.randint(1, 6000), rng.randint(1, 60)
        made.append(
            TraceRequest(now_s, isl, osl, hashes_of(rng.randrange(families), isl // block_size))
        )
    return Trace("small", block_size, made)


def scenario(workers=4, *, model=None, **fields):
    return Scenario(models=(model or llama_8b(),) * workers, **fields)


def make_core(overlap_score_weight=1.0, router_temperature=0.0, **fields):
    """Of routers with ids of their own."""
    policy, ids = PolicySettings(overlap_score_weight, router_temperature), count(1)
    return lambda rng: RouterCore(
        settings(policy=policy, router_id=next(ids), **fields), RadixTree, rng
    )
