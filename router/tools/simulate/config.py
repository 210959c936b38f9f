"""Configuration of `kv-router simulate`, printed by its `--help`."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Struct

from router.errors import ConfigError
from router.runtime.process.loading import load
from router.runtime.process.settings import about

PREFIX = "KV_ROUTER_SIMULATE_"


class SimulateConfig(Struct, frozen=True, kw_only=True):
    """Settings of a simulation.

    Lists are separated by spaces. Options of an item follow its name, as in
    `dynamo-1.0:overlap_score_weight=8,router_temperature=0.1`.

    Workloads whose requests arrive at their times: `shared-prompts`, `multi-turn`, `agents`,
    `long-tail`, `documents` (long prompts beside conversations). In a closed loop, where the next
    request follows the responses before it: `agentic-code` (tools, people, subagents), `chat-users`
    (a fixed number of users at once) and `rollouts` (groups of equal prompts at once), as in
    `agentic-code:sessions=100,sessions_per_s=0.05`.
    """

    trace: Annotated[
        str,
        about(
            "file (Mooncake's JSONL, or written by `kv-router record`), or a workload "
            "(NAME:key=value,…): shared-prompts, multi-turn, agents, long-tail, documents, "
            "agentic-code, chat-users, rollouts",
            unit="TRACE",
        ),
    ] = ""
    policies: Annotated[
        str,
        about(
            "policies to compare; their settings are options of `kv-router serve`", unit="POLICIES"
        ),
    ] = "predictive dynamo-1.0 round-robin"
    speeds: Annotated[
        str,
        about(
            "list of factors by which requests, or in a closed loop sessions, "
            "arrive faster than in the trace",
            unit="FACTORS",
        ),
    ] = "1"
    seeds: Annotated[str, about("list of seeds; every run is repeated with each", unit="SEEDS")] = (
        "0"
    )
    workers: Annotated[
        int, about("number of workers; 0: as many as recorded, or 16", ge=0, le=4096)
    ] = 0
    models: Annotated[
        str,
        about(
            "speed of the workers, a list assigned in turn: 70b, 8b, a JSON file "
            "of constants, or a recording with load reports to fit; empty: as "
            "recorded, or 70b",
            unit="MODELS",
        ),
    ] = ""
    incidents: Annotated[
        str,
        about(
            "list of faults: slow:at_s=60,worker=3,slowness=2 or fail:at_s=9,worker=1,down_s=5",
            unit="FAULTS",
        ),
    ] = ""
    physics: Annotated[
        str,
        about(
            "what engines do that no router knows, by name: plain (nothing), noise, stragglers, "
            "pauses, warm-up, preemption, deferring (prompts wait for room in a step, so that "
            "equal ones are computed once), speculation, windows, states (both: hybrid models), "
            "background, lying, lost, polled, silent, everything, …; also the "
            "speed and number of workers where they are not given",
            unit="NAME",
        ),
    ] = "plain"
    block_size: Annotated[
        int, about("tokens per block, for Mooncake's traces and for workloads", ge=1, le=65_536)
    ] = 512
    limit: Annotated[int, about("run only the first N requests; 0: all", ge=0, unit="REQUESTS")] = 0
    spread_arrivals: Annotated[
        bool,
        about(
            "for traces with rounded times: spread requests with the same time "
            "evenly until the next time"
        ),
    ] = False
    event_lag_s: Annotated[
        float, about("delay from an engine's cache to a router's index", ge=0)
    ] = 0.05
    report_lag_s: Annotated[float, about("delay of load reports", ge=0)] = 0.05
    report_interval_s: Annotated[float, about("interval of load reports", gt=0)] = 1.0
    routers: Annotated[
        int, about("number of routers, used in turn", ge=1, le=64, unit="ROUTERS")
    ] = 1
    sync_lag_s: Annotated[float, about("delay from a router to the other routers", ge=0)] = 0.02
    tracks_output: Annotated[
        bool, about("callers report every block of output to their router")
    ] = False
    html: Annotated[str, about("file for a report with plots; empty: none", unit="FILE")] = ""
    json: Annotated[bool, about("print the summaries as JSON, one line per run")] = False


def load_simulate_config(arguments: Sequence[str]) -> SimulateConfig:
    """Return the settings; the trace needs no flag. Raises ConfigError."""
    config = load(SimulateConfig, arguments, {}, PREFIX, positional="trace")
    if not config.trace:
        raise ConfigError("trace", "missing", "a file, or a workload, as kv-router simulate TRACE")
    return config
