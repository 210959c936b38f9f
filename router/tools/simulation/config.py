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
        Meta(description="file (Mooncake's JSONL, or of `kv-router record`), or a workload"),
    ] = ""
    policies: Annotated[
        str, Meta(description="list; options are those of `kv-router serve` that decide")
    ] = "predictive dynamo-1.0 round-robin"
    speeds: Annotated[
        str, Meta(description="list: how many times as fast as in the trace requests come")
    ] = "1"
    seeds: Annotated[str, Meta(description="list: each run is repeated with each")] = "0"
    workers: Annotated[
        int, Meta(ge=0, le=4096, description="workers; 0: as many as recorded, or 16")
    ] = 0
    models: Annotated[
        str,
        Meta(
            description="list, in turn for each worker: 70b, 8b, a JSON file of constants, "
            "or a recording, whose load reports tell them; empty: as recorded, or 70b"
        ),
    ] = ""
    incidents: Annotated[
        str,
        Meta(description="list: slow:at_s=60,worker=3,slowness=2 or fail:at_s=9,worker=1,down_s=5"),
    ] = ""
    block_size: Annotated[
        int, Meta(ge=1, le=65_536, description="tokens; of Mooncake's traces, and workloads")
    ] = 512
    limit: Annotated[int, Meta(ge=0, description="the first so many requests; 0: all")] = 0
    spread_arrivals: Annotated[
        bool,
        Meta(description="requests of one moment come evenly until the next: of rounded traces"),
    ] = False
    event_lag_s: Annotated[
        float, Meta(ge=0, description="from an engine's cache to a router's index")
    ] = 0.05
    report_lag_s: Annotated[float, Meta(ge=0, description="the same of load reports")] = 0.05
    report_interval_s: Annotated[float, Meta(gt=0, description="between load reports")] = 1.0
    routers: Annotated[int, Meta(ge=1, le=64, description="asked in turn")] = 1
    sync_lag_s: Annotated[float, Meta(ge=0, description="from a router to its peers")] = 0.02
    tracks_output: Annotated[
        bool, Meta(description="callers tell routers of each further block of output")
    ] = False
    html: Annotated[str, Meta(description="file to write a report with plots to; empty: none")] = ""
    json: Annotated[bool, Meta(description="print the summaries as JSON, a line a run")] = False


def load_simulate_config(arguments: Sequence[str]) -> SimulateConfig:
    """The configuration; the trace may come first, without its flag. Raises ConfigError."""
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--trace", *arguments]
    config = load(SimulateConfig, arguments, {}, PREFIX)
    if not config.trace:
        raise ConfigError("trace", "missing", "a file, or a workload, as kv-router simulate TRACE")
    return config
