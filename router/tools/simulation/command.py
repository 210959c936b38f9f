"""`kv-router simulate`: what would these policies have done with that trace?

Exit status: 0; 1 if the report could not be written; 2 for a wrong command line, or a trace that
cannot be read; 130 if it was interrupted.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec import json, to_builtins

from router.recording.errors import RecordingError
from router.simulator.errors import TraceError
from router.simulator.scenario import Scenario
from router.simulator.simulation import simulate as replay_trace
from router.simulator.summary import Summary, summarize
from router.tools.simulation.config import SimulateConfig, load_simulate_config
from router.tools.simulation.html_report import html_report
from router.tools.simulation.plan import Plan, planned
from router.tools.simulation.policies import NamedPolicy
from router.tools.simulation.progress import ProgressBar
from router.tools.simulation.results import Result
from router.tools.simulation.summary_table import summary_table

INTERRUPTED = 130


def simulate(arguments: Sequence[str]) -> int:
    """Simulate, print a table, return the exit status. Raises ConfigError."""
    config = load_simulate_config(arguments)
    try:
        plan = planned(config)
    except (TraceError, RecordingError) as error:
        sys.stderr.write(f"kv-router simulate: {config.trace}: {error}\n")
        return 2
    if not config.json:
        _say("\n".join(f"{name}: {text}" for name, text in plan.facts.items()))
    try:
        results = [result for speed in plan.speeds for result in _compared(plan, speed, config)]
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return INTERRUPTED
    return _write_html(config, plan, results) if config.html else 0


def _compared(plan: Plan, arrival_speed: float, config: SimulateConfig) -> list[Result]:
    """Every policy at one speed."""
    results = [_result(plan, policy, arrival_speed, config) for policy in plan.policies]
    if not config.json:
        _say(f"\narrival speed {arrival_speed:g}\n{summary_table(results)}")
    return results


def _result(
    plan: Plan, policy: NamedPolicy, arrival_speed: float, config: SimulateConfig
) -> Result:
    """One policy with every seed; only what the first run left is kept whole."""
    summaries, first = [], None
    for seed in plan.seeds:
        scenario = plan.scenario(arrival_speed, seed)
        bar = ProgressBar(sys.stderr, f"{policy.name}, speed {arrival_speed:g}, seed {seed}")
        outcomes = replay_trace(plan.trace, scenario, policy.make_core, bar.show)
        bar.clear()
        summaries.append(summarize(outcomes))
        first = outcomes if first is None else first
        if config.json:
            _say_json(policy, scenario, summaries[-1])
    assert first is not None
    return Result(policy.name, arrival_speed, summaries, first)


def _say_json(policy: NamedPolicy, scenario: Scenario, summary: Summary) -> None:
    run = {"policy": policy.name, "arrival_speed": scenario.arrival_speed, "seed": scenario.seed}
    _say(json.encode({**run, **to_builtins(summary)}).decode())


def _write_html(config: SimulateConfig, plan: Plan, results: Sequence[Result]) -> int:
    page = html_report(f"kv-router simulate: {plan.trace.name}", plan.facts, results)
    try:
        Path(config.html).write_text(page)
    except OSError as error:
        sys.stderr.write(f"kv-router simulate: {config.html}: {error.strerror}\n")
        return 1
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
