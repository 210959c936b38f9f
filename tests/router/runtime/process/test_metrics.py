"""Tables of metrics, as a registry exposes them."""

from types import SimpleNamespace
from typing import Annotated

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from router.runtime.process.metrics import (
    Counts,
    Event,
    Rows,
    Times,
    counter,
    expose,
    expose_each,
    gauge,
    histogram,
    make_metrics,
    unknown,
)

TABLE: Rows = {
    "open": gauge("Open streams", len),
    "frames": counter("Frames sent"),
    "refused": counter("Frames refused", "counts.refused"),
    "lost": unknown("Frames lost", "counts."),
    "ended": counter("Streams ended", "outcomes", "outcome"),
    "rows": gauge("Rows", lambda _: {("a", 1): 5}, "name", "rank"),
    "pace": gauge("Pace, if limited", "pace"),
}


class Streams:
    frames = 7
    counts = SimpleNamespace(refused=2, lost=3)
    outcomes = {"closed": 4}  # noqa: RUF012
    pace = None

    def __len__(self):
        return 1


class Metrics:
    requests: Annotated[Counts, Event("Requests", ("route", "code"))]
    first_seconds: Annotated[Times, Event("Time to the first piece", bounds_s=(0.1, 1.0))]
    refusals: Annotated[Counter, Event("Requests refused", ("code",))]
    waiting: Annotated[Gauge, Event("Requests waiting")]
    wait_seconds: Annotated[Histogram, Event("Time waited", ("class",), bounds_s=(1.0,))]
    other: int


@pytest.fixture
def registry():
    return CollectorRegistry()


def test_row_reads_path_function_or_labelled_numbers(registry):
    expose(registry, "x_", TABLE, Streams())
    read = registry.get_sample_value
    assert (read("x_open"), read("x_frames_total"), read("x_refused_total")) == (1, 7, 2)
    assert read("x_lost") == 3
    assert read("x_ended_total", {"outcome": "closed"}) == 4
    assert read("x_rows", {"name": "a", "rank": "1"}) == 5


def test_row_that_reads_none_has_no_sample_but_is_listed(registry):
    expose(registry, "x_", TABLE, Streams())
    assert registry.get_sample_value("x_pace") is None
    assert b"# TYPE x_pace gauge" in generate_latest(registry)


def test_subjects_are_read_at_each_scrape(registry):
    subjects = []
    expose_each(registry, "x_", TABLE, ("worker_id",), lambda: subjects)
    assert registry.get_sample_value("x_frames_total", {"worker_id": "7"}) is None
    subjects.append(((7,), Streams()))
    assert registry.get_sample_value("x_frames_total", {"worker_id": "7"}) == 7
    labels = {"worker_id": "7", "outcome": "closed"}
    assert registry.get_sample_value("x_ended_total", labels) == 4


def test_histogram_counts_times_up_to_each_bound(registry):
    times = Times((0.1, 1.0))
    for time_s in (0.05, 0.1, 0.5, 3.0):
        times.note(time_s)
    expose(registry, "", {"x_seconds": histogram("Times", lambda each: each)}, times)
    bounds = ("0.1", "1.0", "+Inf")
    counts = [registry.get_sample_value("x_seconds_bucket", {"le": bound}) for bound in bounds]
    assert counts == [2, 3, 4]
    assert registry.get_sample_value("x_seconds_sum") == pytest.approx(3.65)


def test_annotated_attributes_become_metrics_named_after_them(registry):
    metrics = Metrics()
    make_metrics(metrics, registry, "x_")
    metrics.requests.count("/select", 200)
    metrics.requests.count("/select", 200, by=2)
    metrics.first_seconds.note(0.5)
    metrics.refusals.labels("busy").inc()
    metrics.waiting.set(3)
    metrics.wait_seconds.labels("bulk").observe(2.0)
    read = registry.get_sample_value
    assert read("x_requests_total", {"route": "/select", "code": "200"}) == 3
    assert read("x_first_seconds_count") == 1
    assert read("x_refusals_total", {"code": "busy"}) == 1
    assert read("x_waiting") == 3
    assert read("x_wait_seconds_bucket", {"class": "bulk", "le": "1.0"}) == 0
    assert not hasattr(metrics, "other")
