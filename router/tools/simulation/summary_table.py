"""What runs of the simulator came to, side by side."""

from collections.abc import Sequence

from router.simulator.summary import Summary
from router.tools.tables import table

HEADS = (
    "policy",
    "TTFT mean",
    "median",
    "p99 (ms)",
    "end to end mean",
    "per token mean",
    "p99 (ms)",
    "hit rate",
    "load spread",
    "not served",
)


def summary_table(summaries: Sequence[tuple[str, Summary]]) -> str:
    """A line a run, under what it is called; times in milliseconds."""
    return table(HEADS, [_row(name, summary) for name, summary in summaries])


def _row(name: str, summary: Summary) -> tuple[str, ...]:
    return (
        name,
        *map(_ms, (summary.ttft_mean_s, summary.ttft_median_s, summary.ttft_p99_s)),
        *map(_ms, (summary.e2e_mean_s, summary.tpot_mean_s, summary.tpot_p99_s)),
        f"{summary.hit_rate:.1%}",
        f"{summary.load_spread:.1%}",
        f"{summary.unserved:,}",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds == seconds else "-"
