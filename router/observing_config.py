"""Configuration of what is told of decisions beside their answers; `--help` prints it."""

from typing import Annotated

from msgspec import Meta

from router.queue_config import QueueConfig


class ObservingConfig(QueueConfig, frozen=True, kw_only=True):
    """Where decisions are written down, and how many of them."""

    otlp_endpoint: Annotated[
        str,
        Meta(
            description=(
                "OTLP collector for traces, such as http://host:4318/v1/traces; empty: no traces"
            )
        ),
    ] = ""
    trace_ratio: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="fraction of the requests without a trace of their own that are traced",
        ),
    ] = 0.0
    max_dashboard_streams: Annotated[
        int,
        Meta(
            ge=0, le=1024, description="dashboards open at once; beyond that, 503; 0: no dashboard"
        ),
    ] = 16
    decision_log: Annotated[
        str,
        Meta(
            description=(
                "file that decisions are logged to with their explanation, as JSON "
                "lines; empty: no log"
            )
        ),
    ] = ""
    decision_log_per_s: Annotated[
        float, Meta(gt=0, le=1_000, description="most decisions logged per second")
    ] = 10.0
    decision_log_max_bytes: Annotated[
        int,
        Meta(
            ge=1 << 16,
            description="size at which the log is renamed to NAME.1, replacing the one before",
        ),
    ] = 64 << 20
