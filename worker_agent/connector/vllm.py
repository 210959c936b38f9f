"""vLLM's KV connector over the tiers.

Option of `vllm serve`:

    --kv-transfer-config '{"kv_connector": "KvRouterConnector",
        "kv_connector_module_path": "worker_agent.connector.vllm", "kv_role": "kv_both", …}'

vLLM creates the connector in the scheduler and in every worker, usually in separate processes; the
tiers are in the workers. The halves exchange messages within vLLM's own. This module contains only
the methods that vLLM calls; see `vllm_parts`.

This module is imported before vLLM's workers start, and numba's LLVM must not be loaded by then
(vLLM inspects all modules, and fails). Therefore the rest is imported when it is needed, and
`vllm_metrics` imports one small module of this project only.
"""

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from worker_agent.connector.vllm_parts.metrics import ConnectorMetrics, ConnectorStats

if TYPE_CHECKING:
    from worker_agent.connector.vllm_parts.scheduler_side import SchedulerSide
    from worker_agent.connector.vllm_parts.worker_side import WorkerSide


@dataclass
class InstructionsMetadata(KVConnectorMetadata):
    """Message from the scheduler to every worker."""

    message: bytes


@dataclass
class TierEventsMetadata(KVConnectorWorkerMetadata):
    """Messages from one or more workers to the scheduler."""

    messages: list[bytes]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "TierEventsMetadata":
        """Return the messages of both."""
        assert isinstance(other, TierEventsMetadata)
        return TierEventsMetadata([*self.messages, *other.messages])


class KvRouterConnector(KVConnectorBase_V1, SupportsHMA):
    """The connector as vLLM creates it.

    Loads are always asynchronous: a request is computed once its blocks are loaded, or known to be
    missing.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Create one half. Raises ConfigError for invalid settings or an unsupported engine."""
        super().__init__(vllm_config, role, kv_cache_config)
        from worker_agent.connector.vllm_parts.engine import (
            CacheKinds,
            engine_geometry,
            groups_of,
            settings_of,
        )

        self.settings = settings_of(vllm_config)
        kinds = CacheKinds((FullAttentionSpec, MLAAttentionSpec), (SlidingWindowSpec,))
        groups = groups_of(kv_cache_config, kinds)
        self.facts = engine_geometry(vllm_config, kv_cache_config, groups, self.settings)
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            from worker_agent.connector.vllm_parts import scheduler_side

            self.scheduler_side = scheduler_side.SchedulerSide(self.settings, self.facts)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that is not stored is computed again when it is needed."""
        return False

    @property
    def _scheduler(self) -> "SchedulerSide":
        assert self.scheduler_side is not None, "vLLM calls this in its scheduler"
        return self.scheduler_side

    @property
    def _worker(self) -> "WorkerSide":
        assert self.worker_side is not None, "vLLM calls this in a worker, after registering"
        return self.worker_side

    # ── In the scheduler ─────────────────────────────────────────────────────────────────────────

    def on_new_request(self, request: Any) -> None:
        """See KVConnectorBase_V1."""
        self._scheduler.begin(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See KVConnectorBase_V1."""
        key, now_s = request.request_id, time.monotonic()
        matched = self._scheduler.matched(key, num_computed_tokens, now_s)
        return (None, False) if matched is None else (matched.tokens, matched.is_async)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See KVConnectorBase_V1."""
        tables = list(map(list, blocks.get_block_ids()))
        key, now_s = request.request_id, time.monotonic()
        self._scheduler.allocated(key, tables, num_external_tokens, now_s)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See KVConnectorBase_V1."""
        now_s = time.monotonic()
        return InstructionsMetadata(self._scheduler.instructions(scheduler_output, now_s))

    def update_connector_output(self, connector_output: Any) -> None:
        """See KVConnectorBase_V1. Requests that the result names twice are passed on once."""
        events = connector_output.kv_connector_worker_meta
        if isinstance(events, TierEventsMetadata):
            self._scheduler.learn(events.messages)
        connector_output.finished_sending = self._scheduler.still_to_free(
            connector_output.finished_recving or (), connector_output.finished_sending or ()
        )

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See SupportsHMA."""
        del block_ids
        return self._scheduler.finished(request.request_id, time.monotonic()), None

    def has_pending_push_work(self) -> bool:
        """Return whether vLLM should keep stepping, because blocks are being offloaded."""
        return self._scheduler.has_work(time.monotonic())

    def reset_cache(self) -> bool:
        """Change the names of all blocks, because the weights may have changed."""
        self._scheduler.rename(secrets.token_hex(16))
        return True

    # ── In a worker ──────────────────────────────────────────────────────────────────────────────

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """See KVConnectorBase_V1. Opens the tiers."""
        from worker_agent.connector.vllm_parts import worker_side

        self.worker_side = worker_side.WorkerSide(self.settings, self.facts, kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """See KVConnectorBase_V1: the engine now overwrites the blocks of these requests."""
        self._worker.void(_instructions(kv_connector_metadata))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """See KVConnectorBase_V1."""
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin(_instructions(connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See KVConnectorBase_V1."""
        del forward_context, kwargs
        self._worker.worker.start_load(time.monotonic())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Let the engine compute this layer once it is loaded, with `layer_by_layer`."""
        self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Begin to store this layer, with `layer_by_layer`; else it is stored after the step."""
        del kv_layer, attn_metadata, kwargs
        self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """End the step, and begin its stores."""
        self._worker.worker.end_step(time.monotonic())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See KVConnectorBase_V1. Of several groups, vLLM computes a failed load's prompt anew."""
        over = self._worker.finished(finished_req_ids, time.monotonic())
        failed = set() if len(self.facts.groups) == 1 else _keys(over.failed)
        return KVConnectorTransferResults(_keys(over.stored), _keys(over.loaded), failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See KVConnectorBase_V1. Of several groups, vLLM accepts failed requests only."""
        errors = self._worker.worker.take_load_errors()
        return errors if len(self.facts.groups) == 1 else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata:
        """See KVConnectorBase_V1."""
        return TierEventsMetadata([self._worker.take_events()])

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """See KVConnectorBase_V1: layers are copied between the pieces of a graph."""
        return bool(extra_config.get("layer_by_layer", False))

    # ── In both ──────────────────────────────────────────────────────────────────────────────────

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """See KVConnectorBase_V1."""
        side = self.scheduler_side or self.worker_side
        increases = {} if side is None else side.take_counted()
        return ConnectorStats(increases) if increases else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        """See KVConnectorBase_V1."""
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorMetrics:
        """See KVConnectorBase_V1."""
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """See KVConnectorBase_V1."""
        if self.worker_side is not None:
            self.worker_side.close()


def _instructions(metadata: KVConnectorMetadata) -> bytes:
    assert isinstance(metadata, InstructionsMetadata)
    return metadata.message


def _keys(keys: Iterable[str | int]) -> set[str]:
    return {str(key) for key in keys}
