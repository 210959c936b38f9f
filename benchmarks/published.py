"""Published routing tables of other projects: the same shape of workload, simulated.

python benchmarks/published.py [--quick] [--json] [--only gateways,prefixes] [--jobs 2] [--write]

`gateways`: SMG's 8 gateways before 240 mock workers, with the workload of its own profile
`local-medium`. `prefixes`: llm-d's 150 groups of 6,000 shared tokens on 8 engines. Engines and time
are simulated; routers are this router's core. Nothing of SMG or llm-d is run: rivals are this
router's policies with the view of the cache that is stated, so no row is a figure of theirs.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
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
from router.scheduler.policy.cache_aware import CacheAware
from router.scheduler.selector import Selector
from router.simulator.engine_model import EngineModel
from router.simulator.outcomes import FloatArray, RequestResults
from router.simulator.scenario import Scenario
from router.simulator.simulation import simulate
from router.simulator.summary import spread
from router.simulator.traces import Trace, TraceRequest
from router.simulator.workloads.contexts import Context

NEVER_S = 1e9
"""The lag between routers that share nothing."""

SEED = 1


class View(Struct, frozen=True):
    """How a router chooses, and what it knows beside its own placements: the engines' events, and
    what its peers have booked.
    """

    policy: str
    has_events: bool = True
    has_bookings: bool = True


OURS = View("predictive")
Figures = Mapping[str, float]


# ── SMG ──────────────────────────────────────────────────────────────────────────────────────────

PROMPT_TOKENS = ((0.0, 2_048), (0.216, 5_000), (0.530, 10_000), (0.994, 20_000), (1.0, 24_576))
OUTPUT_TOKENS = ((0.0, 1), (0.351, 1_000), (0.513, 2_000), (0.998, 5_000), (1.0, 6_144))
SESSIONS_PER_S, FOLLOWED, THINK_S = 611 / 240, 0.5, 3.0
"""Sessions begun per second and worker; the part that has a second turn; the pause before it."""
SYSTEM_TOKENS, SUFFIX_TOKENS, GATEWAY_BLOCK = 2_048, 512, 256
ABOUT_E2E_S = 12.0
"""By which a second turn is ordered among the others, so that it meets any router."""

MOCK = EngineModel(
    chunk_tokens=8_192,
    base_s=0.0043,
    prefill_token_s=1 / 80_000,
    attention_token2_s=0.0,
    decode_request_s=0.0,
    decode_kv_token_s=0.0,
    capacity_tokens=1_200_000,
)
"""SMG's `local-medium`: 4.3 ms a step, 80,000 tokens of prompts a second, 1.2 million cached."""

COLD_S = 1.0
"""The time in which routers learn how fast workers are, and what the others book."""

RIVALS = {
    "events alone": View("cache-aware", has_bookings=False),
    "own placements": View("cache-aware", has_events=False, has_bookings=False),
}
"""SGLang's rule, by the events of all engines as SMG's gateways have them, or by nothing shared."""


def drawn_tokens(rng: Random, distribution: Sequence[tuple[float, int]]) -> int:
    """Return a length, linear between the points of a cumulative distribution."""
    chances, tokens = zip(*distribution, strict=True)
    return max(round(float(np.interp(rng.random(), chances, tokens))), 1)


class Gateways(Struct, frozen=True):
    """How much of SMG's run is replayed: workers, seconds of arrivals, and numbers of routers."""

    workers: int
    arrivals_s: float
    counts: tuple[int, ...]

    @property
    def sessions(self) -> int:
        return round(self.workers * SESSIONS_PER_S * self.arrivals_s)


@cache
def gateway_trace(fleet: Gateways) -> Trace:
    """Return sessions of one or two turns; a second one repeats the prompt and adds a suffix.

    Simulated engines keep no outputs, so that a second turn repeats none.
    """
    rng, now_s = Random(SEED), 0.0
    system = Context(0, SYSTEM_TOKENS)
    turns: list[tuple[float, int, TraceRequest]] = []
    for session in range(fleet.sessions):
        now_s += rng.expovariate(fleet.workers * SESSIONS_PER_S)
        context = Context(session + 1, 0, system)
        context.grow(max(drawn_tokens(rng, PROMPT_TOKENS) - SYSTEM_TOKENS, 0))
        later_s = now_s
        for _ in range(1 + (rng.random() < FOLLOWED)):
            osl_tokens = drawn_tokens(rng, OUTPUT_TOKENS)
            turns.append((later_s, session, context.request(now_s, osl_tokens, GATEWAY_BLOCK)))
            context.grow(SUFFIX_TOKENS)
            later_s += THINK_S + ABOUT_E2E_S * rng.random()
    turns.sort(key=lambda turn: turn[0])
    return Trace("gateways", GATEWAY_BLOCK, list(_following(turns)))


def _following(turns: Sequence[tuple[float, int, TraceRequest]]) -> Iterator[TraceRequest]:
    """Yield the requests, each after the one before it in its session."""
    last: dict[int, int] = {}
    for index, (_, session, each) in enumerate(turns):
        after = (last[session],) if session in last else ()
        last[session] = index
        yield TraceRequest(
            each.arrival_s,
            each.isl_tokens,
            each.osl_tokens,
            each.sequence_hashes,
            session=session,
            after=after,
            think_s=THINK_S if after else 0.0,
        )


def run_gateways(fleet: Gateways, routers: int, view: View) -> Figures:
    """Replay the sessions before some routers. The first second is a cold start for all."""
    scenario = Scenario(
        models=(MOCK,) * fleet.workers,
        routers=routers,
        sync_lag_s=0.02 if view.has_bookings else NEVER_S,
        seed=SEED,
    )
    found = simulate(gateway_trace(fleet), scenario, partial(core_of, view))
    _, first = np.unique(found.session_ids, return_index=True)
    is_follow_up = np.ones(len(found.session_ids), bool)
    is_follow_up[first] = False
    served = np.bincount(found.worker_ids.astype(int), minlength=fleet.workers)
    return {
        "follow-ups cached": 100 * hit_rate(found, is_follow_up),
        "all cached": 100 * hit_rate(found, np.ones(len(found.isl_tokens), bool)),
        "requests per worker": 100 * spread(served.astype(float)),
        "mean TTFT": 1e3 * float(np.nanmean(found.ttft_s)),
        "mean TTFT, cold": 1e3 * float(np.nanmean(found.ttft_s[found.arrivals_s < COLD_S])),
        "mean TTFT, warm": 1e3 * float(np.nanmean(found.ttft_s[found.arrivals_s >= COLD_S])),
    }


def hit_rate(found: RequestResults, which: FloatArray) -> float:
    """Return the cached fraction of the prompts' tokens."""
    return float(found.cached_tokens[which].sum() / found.isl_tokens[which].sum())


# ── llm-d ────────────────────────────────────────────────────────────────────────────────────────

GROUPS, USERS, SHARED_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 150, 5, 6_000, 1_200, 1_000
RATES = (3.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0)
PODS, POD_BLOCK = 8, 64
POD = EngineModel(
    chunk_tokens=8_192,
    base_s=0.012,
    prefill_token_s=1 / 15_000,
    attention_token2_s=1.2e-9,
    decode_request_s=0.00005,
    decode_kv_token_s=3.9e-8,
    capacity_tokens=307_328,
)
"""32 B parameters on two H100: weights in 64 GB / 6.7 TB/s, half of 2 × 990 TFLOP/s."""

VIEWS = {
    "approximate": View("predictive", has_events=False),
    "load": View("least-loaded"),
    "random": View("random"),
}


@cache
def prefix_trace(stage_s: float) -> Trace:
    """Return Poisson arrivals at each rate in turn, of random users.

    Each user asks the same each time, so that all prompts together fill 73 % of the caches.
    """
    rng, now_s, requests = Random(SEED), 0.0, []
    groups = [Context(group, SHARED_TOKENS) for group in range(GROUPS)]
    users = [Context(GROUPS + user, 0, groups[user % GROUPS]) for user in range(GROUPS * USERS)]
    for user in users:
        user.grow(QUESTION_TOKENS)
    for stage, rate in enumerate(RATES):
        while (now_s := now_s + rng.expovariate(rate)) < (stage + 1) * stage_s:
            requests.append(rng.choice(users).request(now_s, ANSWER_TOKENS, POD_BLOCK))
        now_s = (stage + 1) * stage_s
    return Trace("prefixes", POD_BLOCK, requests)


def run_prefixes(stage_s: float, view: View) -> Figures:
    """Replay the groups before one router."""
    found = simulate(
        prefix_trace(stage_s), Scenario(models=(POD,) * PODS, seed=SEED), partial(core_of, view)
    )
    ends_s = found.arrivals_s + found.e2e_s
    return {
        "TTFT p90": 1e3 * float(np.nanpercentile(found.ttft_s, 90)),
        "mean TTFT": 1e3 * float(np.nanmean(found.ttft_s)),
        "all cached": 100 * hit_rate(found, np.ones(len(found.isl_tokens), bool)),
        "output": ANSWER_TOKENS * len(ends_s) / float(np.nanmax(ends_s) - found.arrivals_s[0]),
    }


# ── Both ─────────────────────────────────────────────────────────────────────────────────────────


def core_of(view: View, rng: Random) -> RouterCore:
    """The core of a router with this view. `cache-aware` has the thresholds of SMG's profile."""
    selectors: list[Selector] | None = None
    if view.policy == CacheAware.name:
        selectors = [CacheAware(balance_abs=8.0, balance_rel=1.2, cache_threshold=0.6)]
    name = f"simulated-{rng.getrandbits(53)}"
    config = configured(RouterConfig, name=name, policy=view.policy, use_kv_events=view.has_events)
    return make_core(config, rng, selectors=selectors)


UNITS = {"TTFT": "ms", "output": "tokens/s"}
LOWER = ("TTFT", "requests per worker")
MOST_LOST = 1.1
"""Of several routers, to one."""


def compared(prefix: str, ours: Figures, others: Figures, goal: float = 1.0) -> Iterator[Row]:
    """Yield every figure of ours beside another one."""
    for figure, value in ours.items():
        unit = next((UNITS[word] for word in UNITS if word in figure), "%")
        lower = any(word in figure for word in LOWER)
        yield Row(f"{prefix}: {figure}", value, others[figure], unit, goal, lower)


def gateways(fleet: Gateways, jobs: int) -> list[Row]:
    """Rows of each number of routers, beside each rival; then of several routers beside one."""
    views = {"": OURS, **RIVALS}
    cases = [(count, name) for count in reversed(fleet.counts) for name in views]
    with ProcessPoolExecutor(jobs) as pool:
        run = partial(run_gateways, fleet)
        found = pool.map(run, [n for n, _ in cases], [views[name] for _, name in cases])
        figures = dict(zip(cases, found, strict=True))
    rows: list[Row] = []
    for count in fleet.counts:
        for rival in RIVALS:
            label = f"{count} routers, {rival}"
            rows += compared(label, figures[count, ""], figures[count, rival])
    for count in fleet.counts[1:]:
        label = f"{count} routers to {fleet.counts[0]}"
        some = compared(label, figures[count, ""], figures[fleet.counts[0], ""], MOST_LOST)
        rows += [row for row in some if "TTFT" in row.name]
    return rows


def prefixes(stage_s: float, jobs: int) -> list[Row]:
    """Rows of each way to choose."""
    views = {"": OURS, **VIEWS}
    with ProcessPoolExecutor(jobs) as pool:
        found = pool.map(partial(run_prefixes, stage_s), views.values())
        figures = dict(zip(views, found, strict=True))
    return [row for name in VIEWS for row in compared(name, figures[""], figures[name])]


FULL, QUICK = Gateways(240, 10.0, (1, 2, 8)), Gateways(30, 1.0, (1, 8))
FULL_STAGE_S, QUICK_STAGE_S = 60.0, 4.0


def measured(arguments: argparse.Namespace) -> dict[str, Callable[[], list[Row]]]:
    """What each section measures."""
    fleet = QUICK if arguments.quick else FULL
    stage_s = QUICK_STAGE_S if arguments.quick else FULL_STAGE_S
    return {
        "gateways": partial(gateways, fleet, arguments.jobs),
        "prefixes": partial(prefixes, stage_s, arguments.jobs),
    }


TITLES = {
    "gateways": "simulated: routers before mock workers, sessions as in SMG's profile",
    "prefixes": f"simulated: {GROUPS} groups on {PODS} engines, as llm-d describes them",
}


def main() -> int:
    parser = section_parser(__doc__, TITLES)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    measures = measured(arguments)
    sections = {name: Section(TITLES[name], measures[name]) for name in arguments.only}
    fleet = QUICK if arguments.quick else FULL
    stage_s = QUICK_STAGE_S if arguments.quick else FULL_STAGE_S
    scale = (
        f"simulated, one seed: {fleet.workers} workers, {fleet.sessions:,} sessions in "
        f"{fleet.arrivals_s:g} s; {len(RATES)} rates of {stage_s:g} s"
    )
    return report(sections, Benchmark("published", "other", scale), arguments)


if __name__ == "__main__":
    sys.exit(main())
