"""Configuration of `kv-router simulate`; its `--help` prints it."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from router.errors import ConfigError
from router.process.settings import load

PREFIX = "KV_ROUTER_SIMULATE_"


class SimulateConfig(Struct, frozen=True, kw_only=True):
    """What to simulate. Lists are separated by blanks; options of an item follow its name, as in
    `dynamo-1.0:overlap_score_weight=8,router_temperature=0.1`.
    """

    trace: Annotated[
        str,
        Meta(
            description=(
                "file (Mooncake's JSONL, or written by `kv-router record`), or the "
                "name of a workload"
            )
        ),
    ] = ""
    policies: Annotated[
        str,
        Meta(description="policies to compare; their settings are options of `kv-router serve`"),
    ] = "predictive dynamo-1.0 round-robin"
    speeds: Annotated[
        str, Meta(description="list of factors by which requests come faster than in the trace")
    ] = "1"
    seeds: Annotated[str, Meta(description="list of seeds; every run is repeated with each")] = "0"
    workers: Annotated[
        int, Meta(ge=0, le=4096, description="number of workers; 0: as many as recorded, or 16")
    ] = 0
    models: Annotated[
        str,
        Meta(
            description=(
                "speed of the workers, a list assigned in turn: 70b, 8b, a JSON file "
                "of constants, or a recording with load reports to fit; empty: as "
                "recorded, or 70b"
            )
        ),
    ] = ""
    incidents: Annotated[
        str,
        Meta(
            description=(
                "list of faults: slow:at_s=60,worker=3,slowness=2 or fail:at_s=9,worker=1,down_s=5"
            )
        ),
    ] = ""
    block_size: Annotated[
        int,
        Meta(
            ge=1, le=65_536, description="tokens per block, for Mooncake's traces and for workloads"
        ),
    ] = 512
    limit: Annotated[int, Meta(ge=0, description="run only the first N requests; 0: all")] = 0
    spread_arrivals: Annotated[
        bool,
        Meta(
            description=(
                "for traces with rounded times: spread requests with the same time "
                "evenly until the next time"
            )
        ),
    ] = False
    event_lag_s: Annotated[
        float, Meta(ge=0, description="delay from an engine's cache to a router's index")
    ] = 0.05
    report_lag_s: Annotated[float, Meta(ge=0, description="delay of load reports")] = 0.05
    report_interval_s: Annotated[float, Meta(gt=0, description="between load reports")] = 1.0
    routers: Annotated[int, Meta(ge=1, le=64, description="number of routers, asked in turn")] = 1
    sync_lag_s: Annotated[
        float, Meta(ge=0, description="delay from a router to the other routers")
    ] = 0.02
    tracks_output: Annotated[
        bool, Meta(description="callers report every block of output to their router")
    ] = False
    html: Annotated[str, Meta(description="file for a report with plots; empty: none")] = ""
    json: Annotated[bool, Meta(description="print the summaries as JSON, one line per run")] = False


def load_simulate_config(arguments: Sequence[str]) -> SimulateConfig:
    """The configuration; the trace may come first, without its flag. Raises ConfigError."""
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--trace", *arguments]
    config = load(SimulateConfig, arguments, {}, PREFIX)
    if not config.trace:
        raise ConfigError("trace", "missing", "a file, or a workload, as kv-router simulate TRACE")
    return config
