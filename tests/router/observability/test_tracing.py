"""Spans of decisions, as a real collector would get them."""

import asyncio
import gzip
import time
import zlib
from contextlib import asynccontextmanager, suppress

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from router.core.commands import Select
from router.core.views.decisions import explain
from router.observability import tracing
from router.observability.tracing import Tracer
from router.protocol.requests import SelectRequest
from router.sequence.active.prompt import prepare
from router.sequence.active.stages import Stages
from support.processes.listening import listening
from support.processes.running import RunningRouter
from support.values.builders import World

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
CODINGS = {"gzip": gzip.decompress, "deflate": zlib.decompress}


class Collector:
    """An HTTP server that takes OTLP messages; `status` is what it answers, once `may_answer`."""

    def __init__(self):
        self.heads = []
        self.messages = []
        self.status = 200
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    @property
    def resources(self):
        return [each for message in self.messages for each in message.resource_spans]

    @property
    def spans(self):
        scopes = [scope for each in self.resources for scope in each.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    async def _answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        lines = [line.partition(":") for line in head.split("\r\n")]
        headers = {name: value.strip() for name, _, value in lines}
        body = await reader.readexactly(int(headers["content-length"]))
        body = CODINGS.get(headers.get("content-encoding"), bytes)(body)
        self.heads.append(headers)
        await self.may_answer.wait()
        self.messages.append(ExportTraceServiceRequest.FromString(body))
        writer.write(
            b"HTTP/1.1 %d X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % self.status
        )
        await writer.drain()
        writer.close()

    @asynccontextmanager
    async def running(self):
        async with listening(self._answer) as port:
            self.url = f"http://127.0.0.1:{port}/v1/traces"
            yield self


async def traced(nats_server, headers, **fields):
    """The collector's spans of one placement, sent when the router ends at the latest."""
    async with Collector().running() as collector:
        fields = {"otlp_endpoint": collector.url, **fields}
        async with RunningRouter(nats_server.url, **fields).running() as router:
            await router.worker(1)
            body = {"token_ids": [*range(8)], "request_id": "r"}
            answer = await router.post("/select_and_reserve", body, headers=headers)
            assert answer.status_code == 200
        return collector, answer


@pytest.fixture
def decided():
    """A decision and its times."""
    world = World()
    world.worker(1)
    stages = Stages(time.perf_counter, is_traced=True)
    request = SelectRequest(token_ids=[*range(8)])
    prompt = prepare(request, world.core.identities(request.scope), stages)
    placement, _ = world.core.handle(Select(request, prompt), 0.0)
    return explain(world.core, request, placement, 0.0, is_booked=False), stages


async def recorded(collector, decided, count):
    """The tracer of so many decisions, once it has sent all that it can."""
    tracer = Tracer(collector.url, "kv-router-1", 1.0)
    for _ in range(count):
        tracer.record("select", *decided)
    task = asyncio.create_task(tracer.run())
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return tracer


async def test_a_decision_is_a_span_in_its_callers_trace(nats_server):
    collector, answer = await traced(nats_server, SAMPLED)
    (span,) = collector.spans
    assert (span.name, span.kind) == ("kv_router.select_and_reserve", span.SPAN_KIND_SERVER)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, SPAN)
    assert answer.headers["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01"
    (resource,) = collector.resources
    named = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert named["service.name"]
    assert [scope.scope.name for scope in resource.scope_spans] == ["kv_router"]


async def test_a_span_shows_the_decision_and_the_seconds_of_its_stages(nats_server):
    before_ns = time.time_ns()
    collector, _ = await traced(nats_server, SAMPLED)
    (span,) = collector.spans
    said = {each.key.removeprefix("kv_router."): each.value for each in span.attributes}
    assert {"model_name", "routing_group", "dp_rank", "overlap_blocks"} < set(said)
    assert said["policy"].string_value == "dynamo-1.0"
    assert (said["worker_id"].int_value, said["isl_tokens"].int_value) == (1, 8)
    stages_s = [
        said[f"{stage}_s"].double_value
        for stage in ("block_hashing", "sequence_hashing", "find", "scheduling")
    ]
    assert all(seconds > 0 for seconds in stages_s)
    assert said["waited_s"].double_value == 0
    whole_ns = span.end_time_unix_nano - span.start_time_unix_nano
    assert whole_ns == pytest.approx(sum(stages_s) * 1e9, abs=1_000)
    assert before_ns < span.start_time_unix_nano < span.end_time_unix_nano < time.time_ns()


async def test_unsampled_trace_exports_no_spans(nats_server):
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
    collector, _ = await traced(nats_server, headers, trace_ratio=1.0)
    assert collector.spans == []


@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (1.0, 1)])
async def test_without_a_trace_a_fraction_begins_one(nats_server, ratio, count):
    collector, _ = await traced(nats_server, {}, trace_ratio=ratio)
    assert len(collector.spans) == count


async def test_spans_of_no_trace_have_ids_of_their_own_and_no_parent(decided):
    async with Collector().running() as collector:
        await recorded(collector, decided, 100)
    assert len({span.trace_id for span in collector.spans}) == 100
    assert len({span.span_id for span in collector.spans}) == 100
    assert {len(span.trace_id) for span in collector.spans} == {16}
    assert {span.parent_span_id for span in collector.spans} == {b""}


async def test_many_spans_are_sent_in_several_messages(decided, monkeypatch):
    monkeypatch.setattr(tracing, "BATCH_SPANS", 64)
    async with Collector().running() as collector:
        tracer = await recorded(collector, decided, 150)
    sent = [len(each.resource_spans[0].scope_spans[0].spans) for each in collector.messages]
    assert sent == [64, 64, 22]
    assert tracer.spans == {"sent": 150, "failed": 0, "dropped": 0}


async def test_spans_under_way_when_the_router_ends_are_sent(decided, monkeypatch, eventually):
    monkeypatch.setattr(tracing, "SEND_INTERVAL_S", 0.01)
    async with Collector().running() as collector:
        collector.may_answer.clear()
        tracer = Tracer(collector.url, "kv-router-1", 1.0)
        tracer.record("select", *decided)
        task = asyncio.create_task(tracer.run())
        await eventually(lambda: len(collector.heads) == 1)
        tracer.record("select", *decided)
        task.cancel()
        await asyncio.sleep(0)
        collector.may_answer.set()
        await asyncio.wait([task])
    assert len(collector.spans) == 2
    assert tracer.spans == {"sent": 2, "failed": 0, "dropped": 0}


async def test_spans_beyond_the_queue_are_dropped_and_counted(decided, monkeypatch):
    monkeypatch.setattr(tracing, "QUEUE_SPANS", 3)
    async with Collector().running() as collector:
        tracer = await recorded(collector, decided, 5)
    assert tracer.spans == {"sent": 3, "failed": 0, "dropped": 2}


async def test_spans_that_a_collector_refuses_are_counted(decided):
    async with Collector().running() as collector:
        collector.status = 400
        tracer = await recorded(collector, decided, 5)
    assert tracer.spans == {"sent": 0, "failed": 5, "dropped": 0}


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_settings_of_the_exporter_apply(decided, monkeypatch, coding):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", coding)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-account=17")
    async with Collector().running() as collector:
        await recorded(collector, decided, 5)
    (head,) = collector.heads
    assert (head["content-encoding"], head["x-account"]) == (coding, "17")
    assert head["content-type"] == "application/x-protobuf"
    assert len(collector.spans) == 5


async def test_unreachable_collector_does_not_affect_requests(nats_server):
    fields = {"otlp_endpoint": "http://127.0.0.1:1/v1/traces", "trace_ratio": 1.0}
    async with RunningRouter(nats_server.url, **fields).running() as router:
        await router.worker(1)
        for _ in range(3):
            assert (await router.post("/select", {"token_ids": [1]})).status_code == 200
