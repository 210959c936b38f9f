"""Export of decisions as OpenTelemetry spans; the extra `otel`.

    record ─▶ bounded queue ─ task: encode, in slices ─▶ thread: exporter ─▶ collector

A decision is one span, in its caller's trace, under the caller's span. The seconds of its stages
are attributes. Spans that the collector does not accept in time are dropped and counted.
"""

import asyncio
import gzip
import time
import zlib
from collections import deque
from collections.abc import MutableSequence
from random import randbytes, random

import requests
from msgspec import Struct
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from router.protocol.replies import Decision
from router.runtime.process.metrics import Rows, counter
from router.runtime.process.request_ids import ANSWERED, TraceParent
from router.runtime.process.ticks import next_tick
from router.sequence.active.stages import STAGES, Stages

SEND_TIMEOUT_S = 5.0
SEND_INTERVAL_S = 1.0

BATCH_SPANS, SLICE_SPANS, QUEUE_SPANS = 2_048, 32, 16_384
"""Spans in a message to the collector, spans encoded at once, and spans that may wait."""

_TRACE_ID_BYTES, _SPAN_ID_BYTES = 16, 8
_TEXTS = ("model_name", "routing_group", "policy")
_NUMBERS = ("worker_id", "dp_rank", "isl_tokens", "overlap_blocks", "predicted_cached_blocks")
_SECONDS = (*(f"{stage}_s" for stage in STAGES), "waited_s")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_EXAMPLE = SpanContext(1, 1, is_remote=False, trace_flags=_SAMPLED)
_CALLER = SpanContext(1, 1, is_remote=True, trace_flags=_SAMPLED)


class _Decided(Struct, frozen=True):
    """A decision to be exported. `ended_ns`: in Unix time."""

    command: str
    ended_ns: int
    stages: Stages
    parent: TraceParent | None
    span: TraceParent | None
    texts: tuple[str, str, str]
    numbers: tuple[int, int, int, int, int]


class Tracer:
    """An exporter of traced decisions to an OTLP collector.

    A decision is traced if its caller samples its trace; of decisions without a trace, the fraction
    `ratio` is. `spans`: their numbers by outcome.
    """

    def __init__(self, endpoint: str, service_name: str, ratio: float) -> None:
        resource = Resource.create({"service.name": service_name})
        self._ratio = ratio
        self._queue: deque[_Decided] = deque()
        self._root, self._child = _Form(resource, None), _Form(resource, _CALLER)
        self._batch = self._root.empty_batch()
        self._sender = _Sender(endpoint, self._root.example)
        self._sending = asyncio.Lock()
        self.spans = {"sent": 0, "failed": 0, "dropped": 0}

    def wants_this(self) -> bool:
        """Return whether the current request is to be traced."""
        answered = ANSWERED.get()
        parent = None if answered is None else answered.parent
        if parent is None:
            return self._ratio > 0 and random() < self._ratio
        return bool(int(parent.flags, 16) & TraceFlags.SAMPLED)

    def record(self, command: str, decision: Decision, stages: Stages) -> None:
        """Queue the span of a decision that has just been made. Never waits, never raises."""
        if len(self._queue) >= QUEUE_SPANS:
            self.spans["dropped"] += 1
            return
        answered = ANSWERED.get()
        self._queue.append(
            _Decided(
                command,
                time.time_ns(),
                stages,
                None if answered is None else answered.parent,
                None if answered is None else answered.span,
                (decision.model_name, decision.routing_group, decision.policy),
                (
                    decision.worker_id,
                    decision.dp_rank,
                    decision.isl_tokens,
                    decision.overlap_blocks,
                    decision.predicted_cached_blocks,
                ),
            )
        )

    async def run(self) -> None:
        """Send spans until cancelled, then the remaining ones, until a batch fails."""
        try:
            while True:
                await next_tick(SEND_INTERVAL_S)
                await asyncio.shield(self._send())
        finally:
            await asyncio.shield(self._send())  # after a batch that is under way
            self._sender.close()

    async def _send(self) -> None:
        """Send what waits now; stop if a batch fails, which may have taken `SEND_TIMEOUT_S`."""
        async with self._sending:
            waiting, is_sent = len(_spans(self._batch)) + len(self._queue), True
            while waiting > 0 and is_sent:
                await self._encode()
                batch, self._batch = self._batch, self._root.empty_batch()
                is_sent = await asyncio.to_thread(self._sender.send, batch)
                self.spans["sent" if is_sent else "failed"] += len(_spans(batch))
                waiting -= BATCH_SPANS

    async def _encode(self) -> None:
        """Fill the batch. Requests are served between the slices."""
        spans, queue = _spans(self._batch), self._queue
        while queue and len(spans) < BATCH_SPANS:
            for _ in range(min(SLICE_SPANS, len(queue))):
                decided = queue.popleft()
                form = self._root if decided.parent is None else self._child
                spans.append(form.filled(decided))
            await asyncio.sleep(0)


TRACER_METRICS: Rows = {"spans": counter("Spans, by outcome", "spans", "outcome")}


class _Form:
    """A span as the SDK encodes it, to be filled in and copied for each decision.

    The SDK's own spans and its encoder took 60 µs of processor time per decision, a quarter of a
    cycle; this takes 7. `example`: the span that was encoded.
    """

    def __init__(self, resource: Resource, parent: SpanContext | None) -> None:
        empty: dict[str, str | int | float] = dict.fromkeys(_TEXTS, "")
        empty |= dict.fromkeys(_NUMBERS, 0) | dict.fromkeys(_SECONDS, 0.0)
        self.example = ReadableSpan(
            "kv_router.example",
            _EXAMPLE,
            parent,
            resource,
            {f"kv_router.{name}": value for name, value in empty.items()},
            kind=SpanKind.SERVER,
            instrumentation_scope=InstrumentationScope("kv_router"),
        )
        self._encoded = encode_spans([self.example])
        self._span = _spans(self._encoded).pop()
        values = [each.value for each in self._span.attributes]
        self._texts, rest = values[: len(_TEXTS)], values[len(_TEXTS) :]
        self._numbers, self._seconds = rest[: len(_NUMBERS)], rest[len(_NUMBERS) :]

    def empty_batch(self) -> ExportTraceServiceRequest:
        """Return a message for spans of this resource."""
        batch = ExportTraceServiceRequest()
        batch.CopyFrom(self._encoded)
        return batch

    def filled(self, decided: _Decided) -> Span:
        """Return the span of a decision; the next call overwrites it."""
        form, stages = self._span, decided.stages
        parent, span = decided.parent, decided.span
        if parent is None or span is None:
            form.trace_id, form.span_id = randbytes(_TRACE_ID_BYTES), randbytes(_SPAN_ID_BYTES)
        else:  # the span has already been returned to the caller
            form.trace_id, form.span_id = bytes.fromhex(span.trace_id), bytes.fromhex(span.span_id)
            form.parent_span_id = bytes.fromhex(parent.span_id)
        form.name = f"kv_router.{decided.command}"
        form.start_time_unix_nano = decided.ended_ns - int(stages.total_s * 1e9)
        form.end_time_unix_nano = decided.ended_ns
        for value, text in zip(self._texts, decided.texts, strict=True):
            value.string_value = text
        for value, number in zip(self._numbers, decided.numbers, strict=True):
            value.int_value = number
        times = (*stages.seconds, stages.waited_s)
        for value, seconds in zip(self._seconds, times, strict=True):
            value.double_value = seconds
        return form


class _Sender:
    """A sender of encoded spans: the SDK's exporter, with its settings and retries.

    The exporter takes spans, and encodes them; the session replaces its message.
    """

    def __init__(self, endpoint: str, example: ReadableSpan) -> None:
        self._example = example
        self._session = _Session()
        self._exporter = OTLPSpanExporter(
            endpoint=endpoint, timeout=SEND_TIMEOUT_S, session=self._session
        )

    def send(self, batch: ExportTraceServiceRequest) -> bool:
        """Send a batch, one at a time. Returns False if the collector did not accept it."""
        self._session.message = batch.SerializeToString()
        return self._exporter.export([self._example]) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


class _Session(requests.Session):
    """A session that sends `message` in place of each body, compressed as its head says."""

    message = b""

    def prepare_request(self, request: requests.Request) -> requests.PreparedRequest:
        """Return the request with its head, and with the message."""
        prepared = super().prepare_request(request)
        body, coding = self.message, prepared.headers.get("content-encoding")
        if coding == "gzip":
            body = gzip.compress(body)
        elif coding == "deflate":
            body = zlib.compress(body)
        prepared.prepare_body(body, None)
        return prepared


def _spans(batch: ExportTraceServiceRequest) -> MutableSequence[Span]:
    found: MutableSequence[Span] = batch.resource_spans[0].scope_spans[0].spans
    return found
