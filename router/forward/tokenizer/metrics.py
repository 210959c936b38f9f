"""What tokenizers of our own count, for Prometheus."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.forward.tokenizer.checks import Checks
from router.forward.tokenizer.known_pieces import KnownPieces

_PREFIX = "kv_router_forward_tokenizer_"


class TokenizerMetrics:
    """Counters that tokenizers feed, from any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        text = "Tokens of prompts: known from before, or made"
        self._tokens = Counter(_PREFIX + "tokens", text, ["outcome"], registry=registry)

    def counted(self, known: int, made: int) -> None:
        """Of a prompt."""
        self._tokens.labels("known").inc(known)
        self._tokens.labels("made").inc(made)

    def watch(self, checks: Checks, known: KnownPieces) -> None:
        """Show these, too."""
        self._registry.register(_State(checks, known))


class _State(Collector):
    def __init__(self, checks: Checks, known: KnownPieces) -> None:
        self._checks = checks
        self._known = known

    def collect(self) -> Iterator[Metric]:
        """The state of this moment."""
        text = "Tokens that are remembered, and 32 for each piece of a text"
        yield GaugeMetricFamily(_PREFIX + "held_tokens", text, value=self._known.held_tokens)
        labels = ("model", "kind", "outcome")
        text = "Workers whose engine agrees, differs, or does not say its tokens"
        workers = GaugeMetricFamily(_PREFIX + "workers", text, labels=labels)
        for (model, kind, outcome), count in sorted(self._checks.counts().items()):
            workers.add_metric([model, kind, outcome], count)
        yield workers
        text = "Workers whose blocks are of another size in the engine than for routers"
        differing = sum(1 for _ in self._checks.mismatched_block_sizes())
        yield GaugeMetricFamily(_PREFIX + "mismatched_block_sizes", text, value=differing)
