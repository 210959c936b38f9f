"""Two equal tenants on one fleet, one of which asks for ten times as much: what the other notices.

    python benchmarks/fairness.py [--seconds 60] [--seeds 3]

In virtual time: a real router core, 16 simulated engines of the 8 B preset; alone, the other has 8
of them. A rank is busy above a fraction of the 8,192 tokens that it batches.
"""

import argparse
from functools import partial
from random import Random

import numpy as np

from router.config.core import make_core
from router.config.router import RouterConfig
from router.core.core import RouterCore
from router.runtime.process.settings import configured
from router.simulator.engine_model import llama_8b
from router.simulator.scenario import Scenario
from router.simulator.simulation import simulate
from router.simulator.traces import Trace, TraceRequest

WORKERS = 16
BLOCK_TOKENS = 512
GOAL = 1.2


def prompt_tokens(rng: Random) -> int:
    """4,000 on average, and very different."""
    return max(64, min(int(4000 * rng.lognormvariate(-0.5, 1.0)), 60_000))


def prompts_per_s(workers: int) -> float:
    """How many such prompts so many workers compute."""
    model, rng, step_s = llama_8b(), Random(0), 0.0
    for tokens in (prompt_tokens(rng) for _ in range(2000)):
        step_s += model.base_s * tokens / model.chunk_tokens
        step_s += tokens * model.prefill_token_s + tokens**2 / 2 * model.attention_token2_s
    return workers / (step_s / 2000)


def requests(rng: Random, tenant: str, per_s: float, seconds: float) -> list[TraceRequest]:
    """Poisson; prompts that share nothing, answered with one token."""
    now_s, found = 0.0, []
    while (now_s := now_s + rng.expovariate(per_s)) < seconds:
        tokens = prompt_tokens(rng)
        hashes = [rng.getrandbits(64) for _ in range(tokens // BLOCK_TOKENS)]
        found.append(TraceRequest(now_s, tokens, 1, hashes, tenant))
    return found


def core(threshold: float, rng: Random) -> RouterCore:
    """Of a router whose requests wait, up to 20 s."""
    config = configured(
        RouterConfig,
        policy="dynamo-1.0",
        router_queue_threshold=threshold,
        max_wait_s=20.0,
        max_waiting_requests=65_536,
        max_waiting_tokens=1 << 40,
    )
    return make_core(config, rng)


def p99s(asked: list[TraceRequest], workers: int, threshold: float, *, named: bool = True):
    """Of tenant `a`: p99 of its wait in the queue, and of the time to its first token."""
    asked = sorted(asked, key=lambda each: each.arrival_s)
    are_a = np.array([each.tenant == "a" for each in asked])
    if not named:
        asked = [
            TraceRequest(r.arrival_s, r.isl_tokens, r.osl_tokens, r.sequence_hashes) for r in asked
        ]
    trace = Trace("fairness", BLOCK_TOKENS, asked)
    outcomes = simulate(trace, Scenario(models=(llama_8b(),) * workers), partial(core, threshold))
    counted = are_a & (outcomes.arrivals_s > outcomes.arrivals_s[-1] / 6)
    given_up = float(np.mean(np.isnan(outcomes.ttft_s[counted])))
    found = [np.nanpercentile(each[counted], 99) for each in (outcomes.wait_s, outcomes.ttft_s)]
    return (*found, given_up)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    print("load: of half the fleet, by tenant a; b asks for ten times as much; p99 in seconds")
    print("threshold load | wait alone  beside b  ratio | ttft alone  beside b  ratio | no tenants")
    for threshold in (0.0, 0.5, 1.0):
        for load in (0.5, 0.7, 0.8, 0.9):
            rows = []
            for seed in range(arguments.seeds):
                per_s, rng = load * prompts_per_s(WORKERS // 2), Random(seed)
                a = requests(rng, "a", per_s, arguments.seconds)
                both = a + requests(rng, "b", 10 * per_s, arguments.seconds)
                alone, beside = p99s(a, WORKERS // 2, threshold), p99s(both, WORKERS, threshold)
                blind = p99s(both, WORKERS, threshold, named=False) if load == 0.8 else (np.nan,)
                rows.append((*alone[:2], *beside, blind[0]))
            wait, ttft, wait_b, ttft_b, given_up, blind_s = np.mean(rows, axis=0)
            assert given_up == 0
            verdict = "holds" if wait_b <= GOAL * wait else f"FAILS by {wait_b - GOAL * wait:.3f} s"
            print(
                f"{threshold:9.1f} {load:4.1f} | {wait:10.2f} {wait_b:9.2f} {wait_b / wait:6.2f} |"
                f" {ttft:10.2f} {ttft_b:9.2f} {ttft_b / ttft:6.2f} | {blind_s:6.1f}  {verdict}"
            )


if __name__ == "__main__":
    main()
