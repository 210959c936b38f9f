"""Settings of decision logs, recordings, traces and dashboards; `--help` prints them."""

from typing import Annotated, ClassVar

from msgspec import Struct

from router.runtime.process.settings import COMMON, about


class ObservabilityConfig(Struct, frozen=True, kw_only=True):
    """Settings of where decisions are recorded, and at which rate."""

    GROUP: ClassVar[str] = "logs and traces"

    otlp_endpoint: Annotated[
        str,
        about(
            "OTLP collector for traces, such as http://host:4318/v1/traces; empty: no traces",
            COMMON,
            unit="URL",
        ),
    ] = ""
    trace_ratio: Annotated[
        float,
        about(
            "fraction of the requests without a trace of their own that are traced",
            ge=0,
            le=1,
            unit="FRACTION",
        ),
    ] = 0.0
    max_dashboard_streams: Annotated[
        int,
        about(
            "dashboards open at once; beyond that, 503; 0: no dashboard",
            ge=0,
            le=1024,
            unit="DASHBOARDS",
        ),
    ] = 16
    decision_log: Annotated[
        str,
        about(
            "file that decisions are logged to with their explanation, as JSON lines; empty: none",
            COMMON,
            unit="FILE",
        ),
    ] = ""
    decision_log_per_s: Annotated[
        float, about("limit of decisions logged per second", gt=0, le=1_000)
    ] = 10.0
    decision_log_max_bytes: Annotated[
        int,
        about("size at which the log is renamed to NAME.1, replacing the one before", ge=1 << 16),
    ] = 64 << 20
    record_to: Annotated[
        str,
        about(
            "file that every command and decision is recorded to, from the start, for `kv-router "
            "replay` and `simulate`; it contains prompts; empty: none until POST /recording",
            unit="FILE",
        ),
    ] = ""
    record_max_bytes: Annotated[
        int,
        about(
            "limit of a recording with all its parts, FILE, FILE.1, …; the oldest part is deleted",
            ge=1 << 20,
        ),
    ] = 1 << 30
