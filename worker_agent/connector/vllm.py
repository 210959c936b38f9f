"""vLLM's KV connector over the tiers: `--kv-transfer-config '{"kv_connector": "KvRouterConnector",
"kv_connector_module_path": "worker_agent.connector.vllm", "kv_role": "kv_both", …}'`.

vLLM makes two of it, in two processes as a rule: one in the scheduler, one in every worker, where
the tiers are. They tell each other what they have to within vLLM's own messages. Here is what vLLM
calls, and nothing else; see `vllm_parts`.

What is imported here is imported before vLLM's workers start, and they must not find numba's
LLVM then (vLLM looks through all modules, and stumbles): so the rest is imported when it is needed,
and `vllm_metrics` imports nothing else of ours.
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
    KVConnectorWorkerMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from worker_agent.connector.vllm_metrics import ConnectorMetrics, ConnectorStats

if TYPE_CHECKING:
    from worker_agent.connector.vllm_parts.scheduler_side import SchedulerSide
    from worker_agent.connector.vllm_parts.worker_side import WorkerSide


@dataclass
class InstructionsMetadata(KVConnectorMetadata):
    """From the scheduler to every worker."""

    message: bytes


@dataclass
class NewsMetadata(KVConnectorWorkerMetadata):
    """From a worker, or several, to the scheduler."""

    messages: list[bytes]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "NewsMetadata":
        """What all of these workers did."""
        assert isinstance(other, NewsMetadata)
        return NewsMetadata([*self.messages, *other.messages])


class KvRouterConnector(KVConnectorBase_V1):
    """Loads are asynchronous, always: a request is computed once its blocks are there, or are known
    not to come.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ConfigError for settings, or an engine, that do not go with it."""
        super().__init__(vllm_config, role, kv_cache_config)
        from worker_agent.connector.vllm_parts.engine import check_cache, engine_facts, settings_of

        self.settings = settings_of(vllm_config)
        check_cache(kv_cache_config, FullAttentionSpec)
        self.facts = engine_facts(vllm_config, kv_cache_config, self.settings)
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            from worker_agent.connector.vllm_parts import scheduler_side

            self.scheduler_side = scheduler_side.SchedulerSide(self.settings, self.facts)

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that is not stored is computed another time."""
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
        [block_ids] = blocks.get_block_ids()
        key, now_s = request.request_id, time.monotonic()
        self._scheduler.allocated(key, list(block_ids), num_external_tokens, now_s)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See KVConnectorBase_V1."""
        now_s = time.monotonic()
        return InstructionsMetadata(self._scheduler.instructions(scheduler_output, now_s))

    def update_connector_output(self, connector_output: Any) -> None:
        """See KVConnectorBase_V1. What it names twice is not passed on."""
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, NewsMetadata):
            self._scheduler.learn(told.messages)
        connector_output.finished_sending = self._scheduler.still_to_free(
            connector_output.finished_recving or (), connector_output.finished_sending or ()
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See KVConnectorBase_V1."""
        del block_ids
        return self._scheduler.finished(request.request_id, time.monotonic()), None

    def has_pending_push_work(self) -> bool:
        """Whether vLLM is to go on stepping, for blocks that are going down."""
        return self._scheduler.has_work(time.monotonic())

    def reset_cache(self) -> bool:
        """The weights may be others from now on."""
        self._scheduler.rename(secrets.token_hex(16))
        return True

    # ── In a worker ──────────────────────────────────────────────────────────────────────────────

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """See KVConnectorBase_V1. Opens the tiers."""
        from worker_agent.connector.vllm_parts import worker_side

        self.worker_side = worker_side.WorkerSide(self.settings, self.facts, kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """See KVConnectorBase_V1: their blocks are written over from now on."""
        self._worker.void(_told(kv_connector_metadata))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """See KVConnectorBase_V1."""
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin(_told(connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See KVConnectorBase_V1."""
        del forward_context, kwargs
        self._worker.worker.start_load(time.monotonic())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded into what this step reads."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are stored when the step is over."""

    def wait_for_save(self) -> None:
        """The step is over."""
        self._worker.worker.end_step(time.monotonic())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """See KVConnectorBase_V1."""
        over = self._worker.finished(finished_req_ids, time.monotonic())
        return _keys(over.stored), _keys(over.loaded)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See KVConnectorBase_V1."""
        return self._worker.worker.take_load_errors()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata:
        """See KVConnectorBase_V1."""
        return NewsMetadata([self._worker.news()])

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


def _told(metadata: KVConnectorMetadata) -> bytes:
    assert isinstance(metadata, InstructionsMetadata)
    return metadata.message


def _keys(keys: Iterable[str | int]) -> set[str]:
    return {str(key) for key in keys}
