"""`kv-router simulate`: the results of given policies on a given trace.

Exit status: 0; 1 if the report could not be written; 2 for a wrong command line, or a trace that
cannot be read; 130 if it was interrupted.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from msgspec import json, to_builtins

from router.recording.format import RecordingError
from router.simulator.scenario import Scenario
from router.simulator.simulation import simulate as replay_trace
from router.simulator.summary import Summary, summarize
from router.simulator.traces import TraceError
from router.tools.simulate.config import SimulateConfig, load_simulate_config
from router.tools.simulate.html_report import html_report
from router.tools.simulate.plan import Plan, planned
from router.tools.simulate.specs import NamedPolicy
from router.tools.simulate.summary_table import Result, summary_table

WIDTH = 30


class ProgressBar:
    """A bar that redraws itself; it draws nothing on a stream that is no terminal."""

    __slots__ = ("_drawn", "_is_shown", "_name", "_stream")

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self._is_shown = stream.isatty()
        self._drawn = ""

    def show(self, fraction: float) -> None:
        """Show the completed fraction, 0 to 1."""
        filled = round(min(fraction, 1.0) * WIDTH)
        bar = "█" * filled + "░" * (WIDTH - filled)
        self._draw(f"{bar} {fraction:4.0%} {self._name}")

    def clear(self) -> None:
        """Remove the bar."""
        self._draw("")

    def _draw(self, text: str) -> None:
        if self._is_shown and text != self._drawn:
            self._stream.write("\r" + text.ljust(len(self._drawn)) + "\r" * (not text))
            self._stream.flush()
            self._drawn = text


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
        _print("\n".join(f"{name}: {text}" for name, text in plan.facts.items()))
    try:
        results = [result for speed in plan.speeds for result in _compared(plan, speed, config)]
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return INTERRUPTED
    return _write_html(config, plan, results) if config.html else 0


def _compared(plan: Plan, arrival_speed: float, config: SimulateConfig) -> list[Result]:
    """Run every policy at one speed."""
    results = [_result(plan, policy, arrival_speed, config) for policy in plan.policies]
    if not config.json:
        _print(f"\narrival speed {arrival_speed:g}\n{summary_table(results)}")
    return results


def _result(
    plan: Plan, policy: NamedPolicy, arrival_speed: float, config: SimulateConfig
) -> Result:
    """Run one policy with every seed; all outcomes are kept of the first run only."""
    summaries, first = [], None
    for seed in plan.seeds:
        scenario = plan.scenario(arrival_speed, seed)
        bar = ProgressBar(sys.stderr, f"{policy.name}, speed {arrival_speed:g}, seed {seed}")
        outcomes = replay_trace(plan.trace, scenario, policy.make_core, bar.show)
        bar.clear()
        summaries.append(summarize(outcomes))
        first = outcomes if first is None else first
        if config.json:
            _print_json(policy, scenario, summaries[-1])
    assert first is not None
    return Result(policy.name, arrival_speed, summaries, first)


def _print_json(policy: NamedPolicy, scenario: Scenario, summary: Summary) -> None:
    run = {"policy": policy.name, "arrival_speed": scenario.arrival_speed, "seed": scenario.seed}
    _print(json.encode({**run, **to_builtins(summary)}).decode())


def _write_html(config: SimulateConfig, plan: Plan, results: Sequence[Result]) -> int:
    page = html_report(f"kv-router simulate: {plan.trace.name}", plan.facts, results)
    try:
        Path(config.html).write_text(page)
    except OSError as error:
        sys.stderr.write(f"kv-router simulate: {config.html}: {error.strerror}\n")
        return 1
    return 0


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
