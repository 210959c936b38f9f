"""A table of the policies' results over all seeds."""

from collections.abc import Callable, Sequence
from math import isnan, nan, sqrt

from msgspec import Struct

from router.runtime.process.tables import table
from router.simulator.outcomes import RequestResults
from router.simulator.summary import Summary

_T_QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's t, from 1 degree of freedom."""


class Result(Struct, frozen=True, eq=False):
    """A policy at one arrival speed: a summary per seed, and all outcomes of the first run."""

    policy: str
    arrival_speed: float
    summaries: Sequence[Summary]
    outcomes: RequestResults

    def mean(self, field: str) -> float:
        """Return the mean of a field over all seeds."""
        return sum(self._values(field)) / len(self.summaries)

    def half_width(self, field: str) -> float:
        """Return the half-width of the 95 % confidence interval of that mean; NaN for one seed."""
        count, mean = len(self.summaries), self.mean(field)
        if count < 2:
            return nan
        variance = sum((value - mean) ** 2 for value in self._values(field)) / (count - 1)
        return _t_quantile(count - 1) * sqrt(variance / count)

    def _values(self, field: str) -> list[float]:
        return [float(getattr(summary, field)) for summary in self.summaries]


def _t_quantile(degrees: int) -> float:
    return _T_QUANTILES[degrees - 1] if degrees <= len(_T_QUANTILES) else 1.96 + 2.7 / degrees


class Column(Struct, frozen=True):
    """A field of summaries, with its head, its format, and whether higher is better."""

    head: str
    field: str
    write: Callable[[float], str]
    is_better_higher: bool = False


def milliseconds(seconds: float) -> str:
    """Return whole milliseconds, as text."""
    return "-" if isnan(seconds) else f"{seconds * 1e3:,.0f}"


def percent(fraction: float) -> str:
    """Return a fraction as percent."""
    return "-" if isnan(fraction) else f"{fraction:.1%}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _times(value: float) -> str:
    return "-" if isnan(value) else f"{value:.2f}"


COLUMNS = (
    Column("TTFT mean (ms)", "ttft_mean_s", milliseconds),
    Column("median", "ttft_median_s", milliseconds),
    Column("p99", "ttft_p99_s", milliseconds),
    Column("end to end mean (ms)", "e2e_mean_s", milliseconds),
    Column("p99", "e2e_p99_s", milliseconds),
    Column("per output token mean (ms)", "tpot_mean_s", milliseconds),
    Column("p99", "tpot_p99_s", milliseconds),
    Column("hit rate", "hit_rate", percent, is_better_higher=True),
    Column("load spread", "load_spread", percent),
    Column("session mean (ms)", "session_mean_s", milliseconds),
    Column("p99", "session_p99_s", milliseconds),
    Column("prefixes computed", "prefixes_computed", _times),
    Column("makespan (ms)", "makespan_s", milliseconds),
    Column("not served", "unserved", _count),
)

OF_SESSIONS = ("session_mean_s", "session_p99_s", "prefixes_computed", "makespan_s")
"""Fields shown of traces with sessions only."""

WITH_INTERVALS = ("ttft_mean_s", "e2e_mean_s")
"""Fields shown with confidence intervals if there are several seeds."""


def summary_table(results: Sequence[Result]) -> str:
    """Return a table with a row per policy, of means over the seeds."""
    several = any(len(result.summaries) > 1 for result in results)
    hidden = [] if _any(results, "sessions") else [*OF_SESSIONS]
    hidden += [] if _any(results, "unserved") else ["unserved"]
    columns = [column for column in COLUMNS if column.field not in hidden]
    heads = ["policy"]
    for column in columns:
        heads += [column.head] + ["±"] * (several and column.field in WITH_INTERVALS)
    return table(heads, [_row(result, columns, several) for result in results])


def _row(result: Result, columns: Sequence[Column], several: bool) -> list[str]:
    cells = [result.policy]
    for column in columns:
        cells.append(column.write(result.mean(column.field)))
        if several and column.field in WITH_INTERVALS:
            cells.append(column.write(result.half_width(column.field)))
    return cells


def _any(results: Sequence[Result], field: str) -> bool:
    return any(getattr(summary, field) for result in results for summary in result.summaries)
