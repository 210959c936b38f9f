"""One engine that is polled over HTTP: where to ask, and the load of each of its ranks.

TensorRT-LLM's `/metrics` is not asked: what is read there, no other reader gets.
"""

from collections.abc import Mapping
from types import MappingProxyType

from msgspec.structs import replace

from router.errors import WireError
from router.protocol.loads import LoadConstants
from router.publisher.engine_metrics.dialects import DIALECTS, EngineKind, EngineLimits
from router.publisher.engine_metrics.loads import EngineLoad
from router.publisher.engine_metrics.metrics import EngineMetrics
from router.publisher.engine_metrics.rate_windows import RateEstimator
from router.publisher.engine_metrics.sglang_loads import sglang_loads

_LOADS = "/v1/loads?include=core"
_PATHS: Mapping[EngineKind, tuple[str, ...]] = MappingProxyType(
    {
        "vllm": ("/metrics",),
        "sglang": (_LOADS, "/metrics"),
        "trtllm": ("/prometheus/metrics",),
    }
)


class PolledEngine:
    """The paths of one engine, and what its ranks have counted. `limits`: what is known of it."""

    __slots__ = ("_estimators", "_kind", "_limits", "_paths", "_tried")

    def __init__(self, kind: EngineKind, limits: EngineLimits) -> None:
        self._kind = kind
        self._limits = limits
        self._paths = _PATHS[kind]
        self._tried = 0
        self._estimators: dict[int, RateEstimator] = {}

    @property
    def path(self) -> str:
        """The path to ask next."""
        return self._paths[self._tried % len(self._paths)]

    def refused(self) -> None:
        """Ask at the next path: this one does not exist, or needs a key."""
        self._tried += 1

    def life(self, dp_rank: int) -> int:
        """Return the number of lives of a rank that was read."""
        return self._estimators[dp_rank].life

    def take(self, body: bytes, dated_s: float, took_s: float) -> dict[int, EngineLoad]:
        """Return the load of each rank in a response. Raises WireError.

        `dated_s`: the middle of the poll, which took `took_s`.
        """
        started_s = None
        if self.path == _LOADS:
            found = sglang_loads(body, self._limits.block_size or 0)
        else:
            metrics = self._metrics(body.decode("utf-8", "replace"))
            started_s = metrics.started_s
            found = metrics.loads(self._known(metrics.facts()))
        return {
            dp_rank: self._estimator(dp_rank).take(self._named(load), dated_s, took_s, started_s)
            for dp_rank, load in found.items()
        }

    def _estimator(self, dp_rank: int) -> RateEstimator:
        return self._estimators.setdefault(dp_rank, RateEstimator())

    def _metrics(self, text: str) -> EngineMetrics:
        """Return the metrics of any kind of engine: the registered kind may be the default."""
        for kind in (self._kind, *DIALECTS):
            metrics = EngineMetrics(kind, text)
            if not metrics.is_foreign:
                return metrics
        raise WireError("no metrics of an engine in it")

    def _known(self, facts: EngineLimits) -> EngineLimits:
        """Return what the engine says, and what was registered where it does not say it."""
        limits = self._limits
        return replace(
            facts,
            block_size=facts.block_size or limits.block_size,
            total_kv_blocks=facts.total_kv_blocks or limits.total_kv_blocks,
            max_num_batched_tokens=facts.max_num_batched_tokens or limits.max_num_batched_tokens,
        )

    def _named(self, load: EngineLoad) -> EngineLoad:
        """Return a load with the registered limit of tokens per step, if the engine names none."""
        constants, chunk_tokens = load.constants, self._limits.max_num_batched_tokens or 0
        if constants.chunk_tokens or not chunk_tokens:
            return load
        return replace(
            load,
            constants=LoadConstants(
                chunk_tokens, constants.max_running_requests, constants.num_blocks
            ),
        )
