"""What one policy came to, over all seeds."""

from collections.abc import Sequence
from math import nan, sqrt

from msgspec import Struct

from router.simulator.outcomes import Outcomes
from router.simulator.summary import Summary

_T_QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % of Student's t, from 1 degree of freedom."""


class Result(Struct, frozen=True, eq=False):
    """A policy at one arrival speed: a summary for each seed, and all that the first run left."""

    policy: str
    arrival_speed: float
    summaries: Sequence[Summary]
    outcomes: Outcomes

    def mean(self, field: str) -> float:
        """A field of the summaries, over all seeds."""
        return sum(self._values(field)) / len(self.summaries)

    def half_width(self, field: str) -> float:
        """Of the 95 % confidence interval of that mean; NaN for one seed."""
        count, mean = len(self.summaries), self.mean(field)
        if count < 2:
            return nan
        variance = sum((value - mean) ** 2 for value in self._values(field)) / (count - 1)
        return _t_quantile(count - 1) * sqrt(variance / count)

    def _values(self, field: str) -> list[float]:
        return [float(getattr(summary, field)) for summary in self.summaries]


def _t_quantile(degrees: int) -> float:
    return _T_QUANTILES[degrees - 1] if degrees <= len(_T_QUANTILES) else 1.96 + 2.7 / degrees
