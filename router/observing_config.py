"""Configuration of what is told of decisions beside their answers; `--help` prints it."""

from typing import Annotated

from msgspec import Meta

from router.queue_config import QueueConfig


class ObservingConfig(QueueConfig, frozen=True, kw_only=True):
    """Where decisions are written down, and how many of them."""

    otlp_endpoint: Annotated[
        str,
        Meta(description="collector of spans (OTLP), http://host:4318/v1/traces; empty: none"),
    ] = ""
    trace_ratio: Annotated[
        float,
        Meta(ge=0, le=1, description="fraction of requests to trace that come without a trace"),
    ] = 0.0
    max_dashboard_streams: Annotated[
        int, Meta(ge=0, le=1024, description="dashboards open at once; beyond, 503; 0: none")
    ] = 16
    decision_log: Annotated[
        str, Meta(description="file for explained decisions, a JSON line each; empty: none")
    ] = ""
    decision_log_per_s: Annotated[
        float, Meta(gt=0, le=1_000, description="decisions written per second, at most")
    ] = 10.0
    decision_log_max_bytes: Annotated[
        int,
        Meta(
            ge=1 << 16,
            description="at this size the file is renamed to NAME.1, replacing the last one",
        ),
    ] = 64 << 20
