"""One answer of an engine's metrics endpoint."""

from router.publisher.engine_loads import EngineLoad
from router.publisher.metrics_dialects import (
    DIALECTS,
    EngineFacts,
    EngineKind,
    RankMetrics,
    Sources,
)
from router.publisher.prometheus_text import Sample, parse_samples


class EngineMetrics:
    """What the text says. Where a metric that is read is malformed, WireError is raised at once."""

    __slots__ = ("_dialect", "_samples")

    def __init__(self, kind: EngineKind, text: str) -> None:
        self._dialect = DIALECTS[kind]
        self._samples: dict[str, list[Sample]] = {}
        for sample in parse_samples(text, self._dialect.names):
            self._samples.setdefault(sample.name, []).append(sample)

    @property
    def is_foreign(self) -> bool:
        """Is there nothing that this kind of engine says?"""
        return not self._samples

    def facts(self) -> EngineFacts:
        """What it says of the engine."""
        dialect = self._dialect
        return EngineFacts(
            self._label("model_name", dialect.running),
            self._size(dialect.block_size),
            self._size(dialect.total_kv_blocks),
            self._size(dialect.max_num_batched_tokens),
        )

    def load(self, dp_rank: int, facts: EngineFacts) -> EngineLoad | None:
        """How busy a rank is; None if it does not say."""
        rank = RankMetrics(self._samples, self._dialect.rank_label, dp_rank)
        if rank.first((self._dialect.running,)) is None:
            return None
        return self._dialect.load(rank, facts)

    def _size(self, sources: Sources) -> int | None:
        """A number that is the same for every rank: a metric's value, or one of its labels."""
        for name, label in sources:
            for sample in self._samples.get(name, ()):
                text = str(int(sample.value)) if label is None else sample.labels.get(label, "")
                if text.isdecimal() and int(text):
                    return int(text)
        return None

    def _label(self, label: str, name: str) -> str | None:
        values = (sample.labels.get(label) for sample in self._samples.get(name, ()))
        return next((value for value in values if value), None)
