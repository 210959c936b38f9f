"""Export of decisions as OpenTelemetry spans; the extra `otel`.

    kv_router.select_and_reserve            in the caller's trace, under the caller's span
      ├─ kv_router.block_hashing
      ├─ kv_router.sequence_hashing
      ├─ kv_router.scheduling               filter the eligible ranks
      ├─ kv_router.find
      └─ kv_router.scheduling               weigh, choose, reserve

Spans are recorded after the decision; a thread of the SDK sends them. Spans that the collector does
not accept in time are dropped.
"""

import asyncio
import time
from collections.abc import Sequence
from random import random

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    TraceFlags,
    set_span_in_context,
)

from router.protocol.replies import Decision
from router.runtime.process.metrics import Rows, counter
from router.runtime.process.request_ids import ANSWERED, TraceParent
from router.sequence.active.stages import STAGES, TracedStages

SEND_TIMEOUT_S = 5.0


class Tracer:
    """An exporter of traced decisions to an OTLP collector.

    A decision is traced if its caller samples its trace; of decisions without a trace, the fraction
    `ratio` is.
    """

    def __init__(self, endpoint: str, service_name: str, ratio: float) -> None:
        self._ratio = ratio
        self._ids = _Ids()
        self.exporter = _CountingExporter(endpoint=endpoint, timeout=SEND_TIMEOUT_S)
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create({"service.name": service_name}),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(self.exporter))
        self._tracer = self._provider.get_tracer("kv_router")

    def wants_this(self) -> bool:
        """Return whether the current request is to be traced."""
        answered = ANSWERED.get()
        parent = None if answered is None else answered.parent
        if parent is None:
            return self._ratio > 0 and random() < self._ratio
        return bool(int(parent.flags, 16) & TraceFlags.SAMPLED)

    def record(self, command: str, decision: Decision, stages: TracedStages) -> None:
        """Record the span of a decision, and those of its stages."""
        answered = ANSWERED.get()
        span = None if answered is None else answered.span
        parent = None if answered is None else answered.parent
        self._ids.next_span_id = None if span is None else int(span.span_id, 16)
        at_ns = time.time_ns() - _ns(stages.total_s)
        whole = self._tracer.start_span(
            f"kv_router.{command}",
            _context(parent),
            SpanKind.SERVER,
            _attributes(decision),
            start_time=at_ns,
        )
        inside = set_span_in_context(whole)
        for stage, begun_s, ended_s in stages.intervals:
            name = f"kv_router.{STAGES[stage]}"
            start_ns = at_ns + _ns(begun_s - stages.begun_s)
            each = self._tracer.start_span(name, inside, start_time=start_ns)
            each.end(at_ns + _ns(ended_s - stages.begun_s))
        whole.end(at_ns + _ns(stages.total_s))

    async def run(self) -> None:
        """Run until cancelled, then send the remaining spans, within one send timeout."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.shield(asyncio.to_thread(self._provider.shutdown))


TRACER_METRICS: Rows = {
    "spans": counter(
        "Spans, by outcome",
        lambda tracer: {"sent": tracer.exporter.sent, "failed": tracer.exporter.failed},
        "outcome",
    )
}


class _Ids(RandomIdGenerator):
    """Random ids; `next_span_id` is used once, for the span already returned to the caller."""

    next_span_id: int | None = None

    def generate_span_id(self) -> int:
        span_id, self.next_span_id = self.next_span_id, None
        return span_id or super().generate_span_id()


class _CountingExporter(OTLPSpanExporter):
    sent = 0
    failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is SpanExportResult.SUCCESS:
            self.sent += len(spans)
        else:
            self.failed += len(spans)
        return result


def _context(parent: TraceParent | None) -> Context:
    if parent is None:
        return Context()
    return set_span_in_context(
        NonRecordingSpan(
            SpanContext(
                int(parent.trace_id, 16),
                int(parent.span_id, 16),
                is_remote=True,
                trace_flags=TraceFlags(int(parent.flags, 16)),
            )
        ),
        Context(),
    )


def _attributes(decision: Decision) -> dict[str, str | int]:
    return {
        "kv_router.model_name": decision.model_name,
        "kv_router.routing_group": decision.routing_group,
        "kv_router.policy": decision.policy,
        "kv_router.worker_id": decision.worker_id,
        "kv_router.dp_rank": decision.dp_rank,
        "kv_router.isl_tokens": decision.isl_tokens,
        "kv_router.overlap_blocks": decision.overlap_blocks,
        "kv_router.predicted_cached_blocks": decision.predicted_cached_blocks,
    }


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
