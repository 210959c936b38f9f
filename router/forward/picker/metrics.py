"""Prometheus metrics of a picker."""

from typing import Annotated, Literal, TypeAlias

from prometheus_client import CollectorRegistry, Counter

from router.runtime.process.metrics import Counts, Event, Rows, Times, gauge, make_metrics

PREFIX = "kv_router_epp_"
_SECONDS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

StreamEnd: TypeAlias = Literal["answered", "no_answer", "unplaced", "refused"]
"""The state in which a stream ended: with an engine's answer begun; placed, and no answer began;
before the request was placed; with a refusal."""

PICKER_METRICS: Rows = {
    "streams": gauge("Requests in flight at gateways", "open_streams"),
    "body_bytes": gauge("Bytes of the bodies of requests that are not placed yet"),
    "bookings": gauge("Bookings of requests of gateways", "requests.count"),
}


class PickerMetrics:
    """Metrics that the parts of a picker update."""

    requests: Annotated[Counts, Event("Streams of gateways, by their end", ("ended",))]
    refusals: Annotated[Counts, Event("Requests refused by the picker", ("code",))]
    placing_seconds: Annotated[
        Times,
        Event("Time from a request's last byte until it was placed", bounds_s=_SECONDS),
    ]
    served_elsewhere: Annotated[
        Counter,
        Event(
            "Requests that another endpoint served than was chosen: booked there (moved), at an "
            "unknown one, or not to be booked (failed)",
            ("outcome",),
        ),
    ]
    access_log_entries: Annotated[
        Counter,
        Event("Entries of gateways' access logs, by whether they name a booking", ("outcome",)),
    ]

    def __init__(self, registry: CollectorRegistry) -> None:
        make_metrics(self, registry, PREFIX)
