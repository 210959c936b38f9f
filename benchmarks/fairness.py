"""Two equal tenants on one fleet, one of which asks for ten times as much: what the other notices.

    python benchmarks/fairness.py [--quick] [--json] [--only at-once,half,full] [--write]

In virtual time: a real router core, 16 simulated engines of the 8 B preset; alone, the other has 8
of them. A rank is busy above a fraction of the 8,192 tokens that it batches.
"""

import sys
from functools import partial
from random import Random

import numpy as np
from command_line import section_parser
from msgspec import Struct
from report import Benchmark, Section, report
from rows import Row

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

SECTIONS = {
    "at-once": ("p99 wait of a tenant in the router; ranks are busy above nothing", 0.0),
    "half": ("… above half of the tokens of a step", 0.5),
    "full": ("… above the tokens of a step", 1.0),
}
"""By name: a title, and the fraction above which a rank is busy."""


class Scale(Struct, frozen=True):
    """How much is simulated."""

    is_quick: bool

    @property
    def seconds(self) -> float:
        return 15.0 if self.is_quick else 60.0

    @property
    def seeds(self) -> int:
        return 1 if self.is_quick else 3

    def __str__(self) -> str:
        return f"{self.seconds:g} s of traffic, means of {self.seeds} seeds"


def prompt_tokens(rng: Random) -> int:
    """4,000 on average, and very different."""
    return max(64, min(int(4000 * rng.lognormvariate(-0.5, 1.0)), 60_000))


def prompts_per_s(workers: int) -> float:
    """Return the rate of such prompts that `workers` workers compute."""
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
    """Return the settings of a router whose requests wait, up to 20 s."""
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


def rows(scale: Scale, threshold: float) -> list[Row]:
    """Return, by load of tenant `a` alone, its p99 wait beside `b` against alone."""
    return [_row(scale, threshold, load) for load in (0.5, 0.7, 0.8, 0.9)]


def _row(scale: Scale, threshold: float, load: float) -> Row:
    found = []
    for seed in range(scale.seeds):
        per_s, rng = load * prompts_per_s(WORKERS // 2), Random(seed)
        a = requests(rng, "a", per_s, scale.seconds)
        both = a + requests(rng, "b", 10 * per_s, scale.seconds)
        alone, beside = p99s(a, WORKERS // 2, threshold), p99s(both, WORKERS, threshold)
        blind = p99s(both, WORKERS, threshold, named=False) if load == 0.8 else (np.nan,)
        found.append((*alone[:2], *beside, blind[0]))
    wait_s, ttft_s, wait_beside_s, ttft_beside_s, given_up, blind_s = np.mean(found, axis=0)
    assert given_up == 0
    without = "" if np.isnan(blind_s) else f"; without tenants the wait is {blind_s:.1f} s"
    note = f"TTFT {ttft_beside_s:.2f} s beside {ttft_s:.2f} s{without}"
    return Row(
        f"load {load}", float(wait_beside_s), float(wait_s), "s", GOAL, lower=True, note=note
    )


def main() -> int:
    arguments = section_parser(__doc__, SECTIONS).parse_args()
    scale = Scale(arguments.quick)
    chosen = {
        name: Section(title, partial(rows, scale, threshold))
        for name, (title, threshold) in SECTIONS.items()
        if name in arguments.only
    }
    return report(chosen, Benchmark("fairness", "alone", str(scale)), arguments)


if __name__ == "__main__":
    sys.exit(main())
