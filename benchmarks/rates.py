"""How well a router learns how fast engines without an agent are.

    python benchmarks/rates.py [--quick] [--json] [--seeds 8]

In virtual time: a real router core and one simulated engine of the fixed model, whose metrics count
exactly as vLLM's do and are polled once a second. The truth is known: what a prompt token of this
traffic costs that engine, attention included, steps apart. Each row is the mean relative error
after 60 s or 5 min of traffic, over seeds: from polls and the times to first tokens that a
forwarder reports, or from polls alone. The engine starts cold: the guards of first requests are in
force.

Row `vLLM on CPU`: a captured half minute of a real one, where the truth is the same engine asked
one request at a time.
"""

import json
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import mean

import numpy as np
import numpy.typing as npt
from command_line import section_parser
from msgspec import Struct
from report import Benchmark, Section, report
from rows import Row
from timing import Bounded

from router.config.core import make_core
from router.config.router import RouterConfig
from router.core.core import RouterCore
from router.protocol.loads import LoadCounters, LoadGauges, PolledLoad
from router.protocol.values import Rank
from router.publisher.engine_metrics.loads import EngineLoad, WorkSeen
from router.publisher.engine_metrics.rate_windows import RateEstimator
from router.scheduler.predictor.predictor import Predictor
from router.sequence.active.tracker import FirstToken
from router.sequence.rank_table import CONTEXT_S, PREFILL_S, RATE_ERROR, RankTable
from router.simulator.engine_model import EngineModel, llama_8b, llama_70b
from router.simulator.outcomes import RequestResults
from router.simulator.scenario import LoadSources, Scenario
from router.simulator.simulation import SAMPLES, simulate
from router.simulator.traces import Trace, TraceRequest

SECTIONS = {
    "simulated": "engines in virtual time, after 60 s and 5 min",
    "captured": "half a minute of a real vLLM on the CPU",
}
SECONDS, OUTPUT_TOKENS, BLOCK_TOKENS = 300.0, 350, 512
RANK = Rank(0, 0)
POLLED = LoadSources(source="polled")
GOALS = {("first tokens", 60): 0.25, ("first tokens", 300): 0.1} | {
    ("polls alone", 60): 0.4,
    ("polls alone", 300): 0.2,
}
CAPTURED = Path(__file__).parents[1] / "tests/vectors/metrics/vllm_0.32_rates.json"
CAPTURED_TOKENS, CAPTURED_STEP_MS, CAPTURED_GOAL = 6_400, 1.9, 0.2


class Shape(Struct, frozen=True):
    """An engine and its traffic: mean prompt, its squared coefficient of variation, arrivals."""

    name: str
    model: EngineModel
    isl_tokens: int
    variation: float
    requests_per_s: float


SHAPES = (
    Shape("70B, 12,000, 75 %", llama_70b(), 12_000, 0.7, 0.16),
    Shape("70B, 12,000, 98 %", llama_70b(), 12_000, 0.7, 0.4),
    Shape("8B, 12,000, 75 %", llama_8b(), 12_000, 0.7, 0.45),
    Shape("8B, 12,000, 98 %", llama_8b(), 12_000, 0.7, 1.2),
    Shape("70B, 2,000, 70 %", llama_70b(), 2_000, 2.0, 0.16),
    Shape("70B, 2,000, 100 %", llama_70b(), 2_000, 2.0, 1.5),
)


class Learned(Struct, frozen=True):
    """The relative errors after 60 s and 5 min, those that the router shows then, and the load."""

    errors: dict[int, float]
    shown: dict[int, float]
    busy: float


def trace(shape: Shape, seed: int) -> Trace:
    """Poisson arrivals of prompts that share nothing; log-normal lengths, exponential outputs."""
    rng, now_s, requests = Random(seed), 0.0, []
    spread = math.log(1 + shape.variation)
    while (now_s := now_s + rng.expovariate(shape.requests_per_s)) < SECONDS:
        tokens = shape.isl_tokens * rng.lognormvariate(-spread / 2, math.sqrt(spread))
        isl_tokens = int(min(max(tokens, 16), 100_000))
        osl_tokens = max(int(rng.expovariate(1 / OUTPUT_TOKENS)), 2)
        hashes = [rng.getrandbits(64) for _ in range(isl_tokens // BLOCK_TOKENS)]
        requests.append(TraceRequest(now_s, isl_tokens, osl_tokens, hashes))
    return Trace("rates", BLOCK_TOKENS, requests)


def learned(shape: Shape, seed: int, *, with_first_tokens: bool) -> Learned:
    """Serve the traffic, and compare what was learned with the truth."""
    traffic, cores, seen = trace(shape, seed), [], []

    def core(rng: Random) -> RouterCore:
        cores.append(make_core(RouterConfig(), rng))
        return cores[0]

    def look(_: float) -> None:
        row = cores[0].ranks.row(RANK)
        seen.append((float(row[PREFILL_S]), float(row[CONTEXT_S]), float(row[RATE_ERROR])))

    # Callers that report first tokens from time to time teach nothing by them.
    late = not with_first_tokens
    scenario = Scenario(models=(shape.model,), loads=POLLED, reports_late=late, seed=seed)
    outcomes = simulate(traffic, scenario, core, look)
    lengths = np.array([float(each.isl_tokens) for each in traffic.requests])
    tokens, contexts = lengths.sum(), (lengths**2 / 2).sum()
    model = shape.model
    true_s = tokens * model.prefill_token_s + contexts * model.attention_token2_s
    errors, shown = {}, {}
    for after_s in (60, 300):
        token_s, context_s, error = seen[min(int(after_s / SECONDS * SAMPLES), SAMPLES) - 1]
        errors[after_s] = abs(float(tokens * token_s + contexts * context_s) / float(true_s) - 1)
        shown[after_s] = error
    return Learned(errors, shown, _busy(outcomes))


def _busy(outcomes: RequestResults) -> float:
    """The part of the trace in which the engine worked."""
    busy_s = np.array(outcomes.busy_s)[: SAMPLES + 1, 0]
    return float((busy_s[-1] - busy_s[0]) / (outcomes.sampled_s[len(busy_s) - 1] or 1.0))


def simulated(seeds: int) -> list[Row]:
    """Two rows per source of what is learned and shape: after 60 s and after 5 min."""
    rows: list[Row] = []
    for shape in SHAPES:
        for source in ("first tokens", "polls alone"):
            found = [
                learned(shape, seed, with_first_tokens=source == "first tokens")
                for seed in range(1, seeds + 1)
            ]
            for after_s in (60, 300):
                goal = GOALS[source, after_s]
                error = mean(each.errors[after_s] for each in found)
                name = f"{shape.name}: {source}, {after_s} s"
                rows.append(Bounded(name, 100 * error, 100 * goal, "%", 100 * goal, lower=True))
            worst = max(each.errors[300] for each in found)
            shown, busy = mean(e.shown[300] for e in found), mean(e.busy for e in found)
            print(
                f"{shape.name}, {source}: busy {busy:.2f}, after 5 min: worst seed {worst:.2f},"
                f" error shown {shown:.2f}",
                file=sys.stderr,
            )
    return rows


# ── A captured engine ────────────────────────────────────────────────────────────────────────────


def captured() -> list[Row]:
    """The error of seconds per prompt token after what was captured of vLLM on two CPU cores."""
    data = json.loads(CAPTURED.read_text())
    alone = data["alone"]["prefill_ms_by_prompt_tokens"]
    lengths = np.array([float(each) for each in alone])
    true_s = 1e-3 * (sum(alone.values()) - CAPTURED_STEP_MS * len(alone)) / lengths.sum()
    rows: list[Row] = []
    goal = 100 * CAPTURED_GOAL
    for name, has_tokens in (("first tokens", True), ("polls alone", False)):
        row = replayed(data, with_first_tokens=has_tokens)
        found_s = float(lengths @ (row[PREFILL_S] + row[CONTEXT_S] * lengths / 2) / lengths.sum())
        error = 100 * abs(found_s / float(true_s) - 1)
        rows.append(Bounded(f"vLLM on CPU: {name}, 26 s", error, goal, "%", goal, lower=True))
    return rows


def replayed(
    data: dict[str, Sequence], *, with_first_tokens: bool, with_polls: bool = True
) -> npt.NDArray[np.float64]:
    """The row of the rank table after all polls and first tokens, in their order."""
    table = RankTable()
    table.add(RANK)
    predictor, estimator = Predictor(table), RateEstimator()
    predictor.add(RANK, "m", 0.0)
    polls = [dict(zip(data["poll_columns"], row, strict=True)) for row in data["polls"]]
    events = [(poll["t"] + poll["took_s"], poll) for poll in polls] if with_polls else []
    if with_first_tokens:
        events += _first_tokens(data)
    for at_s, event in sorted(events, key=lambda each: each[0]):
        if isinstance(event, FirstToken):
            predictor.add_first_tokens([(RANK, event)], at_s)
            continue
        middle_s = event["t"] + event["took_s"] / 2
        load = estimator.take(_load(event), middle_s, event["took_s"])
        polled = PolledLoad(
            worker_id=0,
            dp_rank=0,
            source_id=1,
            life_id=estimator.life,
            counters=load.counters,
            gauges=load.gauges,
            timed=load.timed or (),
        )
        predictor.observe(polled, at_s)
    return table.row(RANK)


def _first_tokens(data: dict[str, Sequence]) -> list[tuple[float, FirstToken]]:
    """Those of prompts that had no other ahead of them, and when they came."""
    requests = [dict(zip(data["request_columns"], row, strict=True)) for row in data["requests"]]
    found = []
    for request in requests:
        sent_s = request["start"]
        others = [each for each in requests if each["start"] <= sent_s and each is not request]
        if any(sent_s < each["start"] + each["ttft_s"] for each in others):
            continue
        beside = [each for each in others if sent_s < each["start"] + each["total_s"]]
        tokens = max(request["prompt_tokens"] - request["cached_tokens"], 1)
        contexts = tokens * (request["prompt_tokens"] - tokens / 2)
        kv_tokens = sum(each["prompt_tokens"] for each in beside)
        token = FirstToken(request["ttft_s"], tokens, contexts, len(beside), kv_tokens)
        found.append((sent_s + request["ttft_s"], token))
    return found


def _load(poll: dict[str, float]) -> EngineLoad:
    """A captured poll, which has no histogram of prompt lengths, as `EngineMetrics` reads it."""
    computed = int(poll["prompt_tokens_by_source_total{source=local_compute}"])
    gauges = LoadGauges(int(poll["num_requests_running"]), int(poll["num_requests_waiting"]))
    finished = int(poll["request_prefill_time_seconds_count"])
    counters = LoadCounters(
        steps=int(poll["iteration_tokens_total_count"]),
        prefill_tokens=computed,
        decode_requests=int(poll["generation_tokens_total"]),
        requests_finished=finished,
    )
    hits = poll["prefix_cache_hits_total"]
    seen = WorkSeen(
        steps=counters.steps,
        prompt_tokens=computed,
        admitted_tokens=int(poll["prefix_cache_queries_total"] - hits),
        outputs=int(poll["inter_token_latency_seconds_count"]),
        outputs_s=poll["inter_token_latency_seconds_sum"],
        preemptions=int(poll["num_preemptions_total"]),
        is_working=gauges.running_requests + gauges.waiting_requests > 0,
        used_tokens=round(poll["kv_cache_usage_perc"] * CAPTURED_TOKENS),
        finished=finished,
        finished_tokens=int(poll["request_prefill_kv_computed_tokens_sum"]),
        finished_s=poll["request_prefill_time_seconds_sum"],
        context_tokens=630.0,
    )
    return EngineLoad(gauges, counters, seen=seen)


def main() -> int:
    parser = section_parser(__doc__, SECTIONS)
    parser.add_argument("--seeds", type=int, default=8)
    arguments = parser.parse_args()
    seeds = 2 if arguments.quick else arguments.seeds
    measure = {"simulated": partial(simulated, seeds), "captured": captured}
    chosen = {name: Section(SECTIONS[name], measure[name]) for name in arguments.only}
    return report(chosen, Benchmark("rates", "goal", f"{seeds} seeds"), arguments)


if __name__ == "__main__":
    sys.exit(main())
