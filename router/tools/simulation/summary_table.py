"""What policies came to, side by side."""

from collections.abc import Callable, Sequence
from math import isnan

from msgspec import Struct

from router.process.tables import table
from router.tools.simulation.results import Result


class Column(Struct, frozen=True):
    """A field of summaries, how it is headed and written, and whether more of it is better."""

    head: str
    field: str
    write: Callable[[float], str]
    is_better_higher: bool = False


def milliseconds(seconds: float) -> str:
    """Whole milliseconds."""
    return "-" if isnan(seconds) else f"{seconds * 1e3:,.0f}"


def percent(fraction: float) -> str:
    """A fraction as percent."""
    return "-" if isnan(fraction) else f"{fraction:.1%}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


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
    Column("not served", "unserved", _count),
)

WITH_INTERVALS = ("ttft_mean_s", "e2e_mean_s")
"""Fields that are told with their confidence intervals, where there are several seeds."""


def summary_table(results: Sequence[Result]) -> str:
    """A line a policy; where there were several seeds, their means."""
    several = any(len(result.summaries) > 1 for result in results)
    columns = [column for column in COLUMNS if column.field != "unserved" or _any_unserved(results)]
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


def _any_unserved(results: Sequence[Result]) -> bool:
    return any(summary.unserved for result in results for summary in result.summaries)
