"""Metrics as tables: rows of a subject that are read at each scrape, and metrics of events.

STREAM_METRICS: Rows = {
    "streams": gauge("Connected clients", len),
    "frames": counter("Frames sent"),                          # stream.frames
    "refused": counter("Frames refused", "counts.refused"),    # stream.counts.refused
    "ended": counter("Streams ended", "outcomes", "outcome"),  # {"closed": 5, "failed": 1}
}
expose(registry, "kv_router_", STREAM_METRICS, stream)
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, TypeAlias, get_type_hints

from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Read: TypeAlias = str | Callable[[Any], Any]
"""A function of the subject, or a path to its attribute.

Without a path the attribute is named as the metric, and so is the last part of a path that ends
with a dot. A row with labels reads numbers by label value, or by tuple of label values; the others
read a number, or None for no sample. The numbers of a histogram are `Times`.
"""


class Row(Struct, frozen=True):
    """A metric of a table, which is named by its key in the table."""

    family: Callable[..., Any]
    text: str
    read: Read
    labels: tuple[str, ...]


Rows: TypeAlias = Mapping[str, Row]
Subjects: TypeAlias = Callable[[], Iterable[tuple[Sequence[object], Any]]]
"""Reads subjects, each with the values of the labels that all rows have."""


def gauge(text: str, read: Read = "", *labels: str) -> Row:
    """Return the row of a gauge."""
    return Row(GaugeMetricFamily, text, read, labels)


def counter(text: str, read: Read = "", *labels: str) -> Row:
    """Return the row of a counter; Prometheus appends `_total` to its name."""
    return Row(CounterMetricFamily, text, read, labels)


def unknown(text: str, read: Read = "", *labels: str) -> Row:
    """Return the row of a counter that is exported under its exact name."""
    return Row(UnknownMetricFamily, text, read, labels)


def info(text: str, read: Read = "") -> Row:
    """Return the row of an info metric, which is 1: texts by further label.

    Prometheus appends `_info` to its name.
    """
    return Row(InfoMetricFamily, text, read, ())


def histogram(text: str, read: Read = "", *labels: str) -> Row:
    """Return the row of a histogram."""
    return Row(HistogramMetricFamily, text, read, labels)


def expose(registry: CollectorRegistry, prefix: str, rows: Rows, subject: object) -> None:
    """Add the metrics of one subject."""
    registry.register(_Table(prefix, rows, (), lambda: [((), subject)]))


def expose_each(
    registry: CollectorRegistry, prefix: str, rows: Rows, labels: Sequence[str], subjects: Subjects
) -> None:
    """Add the metrics of several subjects, which are read at each scrape."""
    registry.register(_Table(prefix, rows, labels, subjects))


class _Table(Collector):
    def __init__(self, prefix: str, rows: Rows, labels: Sequence[str], subjects: Subjects) -> None:
        self._rows = [
            (prefix + name, row, (*labels, *row.labels), _reader(name, row.read))
            for name, row in rows.items()
        ]
        self._subjects = subjects

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics. O(rows * subjects)."""
        subjects = list(self._subjects())
        for name, row, labels, read in self._rows:
            family = row.family(name, row.text, labels=labels)
            for values, subject in subjects:
                found = read(subject)
                for more, number in found.items() if row.labels else [((), found)]:
                    more = more if isinstance(more, tuple) else (more,)
                    _add(family, [*map(str, values), *map(str, more)], number)
            yield family


def _reader(name: str, read: Read) -> Callable[[Any], Any]:
    if callable(read):
        return read
    return attrgetter(read + name if not read or read.endswith(".") else read)


def _add(family: Any, values: Sequence[str], number: Any) -> None:
    if isinstance(number, Times):
        family.add_metric(values, number.buckets(), number.sum_s)
    elif number is not None:
        family.add_metric(values, number)


class Counts:
    """A number per combination of label values; counting takes a tenth of a `Counter`'s time."""

    __slots__ = ("numbers",)

    def __init__(self) -> None:
        self.numbers: dict[tuple[str | int, ...], float] = {}

    def count(self, *labels: str | int, by: float = 1) -> None:
        """Add to the number of some label values."""
        self.numbers[labels] = self.numbers.get(labels, 0) + by


class Times:
    """A histogram of seconds."""

    __slots__ = ("_bounds_s", "_counts", "sum_s")

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def note(self, time_s: float) -> None:
        """Record a time."""
        self._counts[bisect_left(self._bounds_s, time_s)] += 1
        self.sum_s += time_s

    def buckets(self) -> list[tuple[str, int]]:
        """Return the upper bound of each bucket, and the number of times up to it."""
        names = [*map(floatToGoString, self._bounds_s), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))


class TimesBy:
    """A histogram of seconds per combination of label values."""

    __slots__ = ("_bounds_s", "times")

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self.times: dict[tuple[str | int, ...], Times] = {}

    def note(self, time_s: float, *labels: str | int) -> None:
        """Record a time of some label values."""
        times = self.times.get(labels)
        if times is None:
            times = self.times[labels] = Times(self._bounds_s)
        times.note(time_s)


class Event(Struct, frozen=True):
    """A row of events, as the annotation of a `Counter`, `Counts`, `Times` or another metric.

    `bounds_s`: the buckets of times.
    """

    text: str
    labels: tuple[str, ...] = ()
    bounds_s: tuple[float, ...] = ()


def make_metrics(owner: object, registry: CollectorRegistry, prefix: str) -> None:
    """Set each attribute of `owner` that is annotated with an `Event` to a new metric.

    The metric is named as the attribute, after `prefix`.
    """
    for name, hint in get_type_hints(type(owner), include_extras=True).items():
        for event in getattr(hint, "__metadata__", ()):
            setattr(owner, name, _made(hint.__origin__, prefix + name, event, registry))


def _made(kind: Any, name: str, event: Event, registry: CollectorRegistry) -> object:
    if kind is Counts:
        counts = Counts()
        expose(registry, "", {name: counter(event.text, "numbers", *event.labels)}, counts)
        return counts
    if kind is Times:
        times = Times(event.bounds_s)
        expose(registry, "", {name: histogram(event.text, lambda each: each)}, times)
        return times
    if kind is TimesBy:
        by = TimesBy(event.bounds_s)
        expose(registry, "", {name: histogram(event.text, "times", *event.labels)}, by)
        return by
    buckets = {"buckets": event.bounds_s} if event.bounds_s else {}
    return kind(name, event.text, event.labels, registry=registry, **buckets)
