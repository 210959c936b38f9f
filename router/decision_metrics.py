"""What is counted of decisions, for Prometheus, without its objects on their way.

A decision that is timed leaves a row of numbers; rows are added up when there are many, and when
Prometheus asks.
"""

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from router.sequence.stages import STAGES, Stages

COMMANDS = ("select", "select_and_reserve")
ROLES = ("aggregated", "prefill", "decode")

_DECISION_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_STAGE_BUCKETS_S = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)

_TIMED = "of one in 32, at most 10 a second"

_COLUMNS = 2 + len(STAGES)
_MOST_ROWS = 1_024

Rows = npt.NDArray[np.float64]


class _Times:
    """A histogram: how many fell into each bucket, and their sum."""

    __slots__ = ("_bounds_s", "_counts", "_sum_s")

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = np.array(bounds_s)
        self._counts = np.zeros(len(bounds_s) + 1, np.int64)
        self._sum_s = 0.0

    def add(self, times_s: Rows) -> None:
        """Times of 0 are of what did not take place."""
        taken_s = times_s[times_s > 0]
        places = np.searchsorted(self._bounds_s, taken_s)
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum_s += float(taken_s.sum())

    def write(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add it to a family, unless it is empty and one of many."""
        running = self._counts.cumsum().tolist()
        if labels and not running[-1]:
            return
        names = [*map(floatToGoString, self._bounds_s.tolist()), "+Inf"]
        family.add_metric(labels, list(zip(names, running, strict=True)), self._sum_s)


class DecisionMetrics(Collector):
    """Decisions, what they took, and what they promised."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._rows = array("d")
        self._decided = dict.fromkeys(COMMANDS, 0)
        self._prompt_tokens = self._cached_tokens = self._sources = 0
        self._seconds = _Times(_DECISION_BUCKETS_S)
        self._stages = {
            (stage, role): _Times(_STAGE_BUCKETS_S) for stage in STAGES for role in ROLES
        }
        registry.register(self)

    def note(
        self,
        command: str,
        role: str,
        isl_tokens: int,
        cached_tokens: int,
        stages: Stages | None,
        *,
        has_source: bool = False,
    ) -> None:
        """A request was placed. `stages`: None where it was not timed. `has_source`: another rank
        was named to have more of the prompt from.
        """
        self._decided[command] += 1
        self._prompt_tokens += isl_tokens
        self._cached_tokens += cached_tokens
        self._sources += has_source
        if stages is None:
            return
        self._rows.extend((ROLES.index(role), stages.total_s - stages.waited_s, *stages.seconds))
        if len(self._rows) == _COLUMNS * _MOST_ROWS:
            self._add_up()

    @property
    def totals(self) -> tuple[int, int, int]:
        """Decisions, the prompt tokens of those, and how many of these were predicted cached."""
        return sum(self._decided.values()), self._prompt_tokens, self._cached_tokens

    def collect(self) -> Iterator[Metric]:
        """The totals of this moment."""
        self._add_up()
        decided = CounterMetricFamily("kv_router_decisions", "Ranks chosen", labels=("command",))
        for command, count in self._decided.items():
            decided.add_metric((command,), count)
        yield decided
        yield CounterMetricFamily(
            "kv_router_prompt_tokens", "Prompt tokens of chosen requests", self._prompt_tokens
        )
        yield CounterMetricFamily(
            "kv_router_predicted_cached_tokens",
            "Prompt tokens predicted to be cached where they were sent",
            self._cached_tokens,
        )
        yield CounterMetricFamily(
            "kv_router_sources_named",
            "Decisions that named another rank to have more of the prompt from",
            self._sources,
        )
        yield from self._histograms()

    def _histograms(self) -> Iterator[Metric]:
        total = HistogramMetricFamily(
            "kv_router_decision_seconds",
            f"Time to hash, match, weigh and book a request; {_TIMED}",
        )
        self._seconds.write(total, ())
        yield total
        stages = HistogramMetricFamily(
            "kv_router_decision_stage_seconds",
            f"Time of each stage of a decision, by the role of the chosen worker; {_TIMED}",
            labels=("stage", "worker_type"),
        )
        for labels, times in self._stages.items():
            times.write(stages, labels)
        yield stages

    def _add_up(self) -> None:
        rows = np.array(self._rows).reshape(-1, _COLUMNS)
        self._rows = array("d")
        self._seconds.add(rows[:, 1])
        for index, role in enumerate(ROLES):
            of_role = rows[rows[:, 0] == index]
            for place, stage in enumerate(STAGES):
                self._stages[stage, role].add(of_role[:, 2 + place])
