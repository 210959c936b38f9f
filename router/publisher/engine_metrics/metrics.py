"""The parsed response of an engine's metrics endpoint."""

from router.protocol.values import MAX_DP_RANK, number_in
from router.publisher.engine_metrics.dialects import (
    DIALECTS,
    MOST_COUNT,
    EngineKind,
    EngineLimits,
    RankMetrics,
    Sources,
    whole_number,
)
from router.publisher.engine_metrics.loads import EngineLoad
from router.publisher.engine_metrics.prometheus_text import Sample, parse_samples

_STARTED = "process_start_time_seconds"
"""Any process may have this metric, which therefore names no kind of engine."""


class EngineMetrics:
    """The metrics of one response. A malformed metric that is used raises WireError on creation."""

    __slots__ = ("_dialect", "_samples")

    def __init__(self, kind: EngineKind, text: str) -> None:
        self._dialect = DIALECTS[kind]
        self._samples: dict[str, list[Sample]] = {}
        for sample in parse_samples(text, {*self._dialect.names, _STARTED}):
            self._samples.setdefault(sample.name, []).append(sample)

    @property
    def is_foreign(self) -> bool:
        """True if the response has no metric of this kind of engine."""
        return self._samples.keys() <= {_STARTED}

    @property
    def started_s(self) -> float | None:
        """The start of its process, in Unix time; None if it does not say."""
        return next((each.value for each in self._samples.get(_STARTED, ())), None)

    def facts(self) -> EngineLimits:
        """Return the constants of the engine."""
        dialect = self._dialect
        block_size = self._size(dialect.block_size)
        return EngineLimits(
            self._label("model_name", dialect.running),
            block_size,
            self._blocks_of_rank(block_size),
            self._size(dialect.max_num_batched_tokens),
        )

    @property
    def rank_count(self) -> int:
        """The number of ranks with metrics, at least one."""
        samples = self._samples.get(self._dialect.running, ())
        return max(len({each.labels.get(self._dialect.rank_label) for each in samples}), 1)

    def load(self, dp_rank: int, facts: EngineLimits) -> EngineLoad | None:
        """Return the load of a rank, or None if it is not reported."""
        rank = RankMetrics(self._samples, self._dialect.rank_label, dp_rank)
        if rank.first((self._dialect.running,)) is None:
            return None
        return self._dialect.load(rank, facts)

    def loads(self, facts: EngineLimits) -> dict[int, EngineLoad]:
        """Return the load of each rank; metrics without a rank are those of rank 0."""
        samples = self._samples.get(self._dialect.running, ())
        names = {each.labels.get(self._dialect.rank_label, "0") for each in samples}
        ranks = {number_in(name, MAX_DP_RANK) for name in names}
        found = {rank: self.load(rank, facts) for rank in ranks if rank is not None}
        return {rank: load for rank, load in found.items() if load is not None}

    def _size(self, sources: Sources) -> int | None:
        """Return a number that all ranks share: a metric's value, or one of its labels."""
        for name, label in sources:
            for sample in self._samples.get(name, ()):
                size = (
                    whole_number(sample.value)
                    if label is None
                    else number_in(sample.labels.get(label, ""), MOST_COUNT)
                )
                if size:
                    return size
        return None

    def _blocks_of_rank(self, block_size: int | None) -> int | None:
        tokens = self._size(self._dialect.pool_tokens)
        if tokens and block_size:
            return tokens // block_size
        blocks = self._size(self._dialect.total_kv_blocks)
        if blocks is None or not self._dialect.is_pool_summed:
            return blocks
        return blocks // self.rank_count or None

    def _label(self, label: str, name: str) -> str | None:
        values = (sample.labels.get(label) for sample in self._samples.get(name, ()))
        return next((value for value in values if value), None)
