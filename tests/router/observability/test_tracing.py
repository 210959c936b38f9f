"""Spans of decisions, as a real collector would get them."""

import asyncio
import gzip
from contextlib import asynccontextmanager

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from support.processes.running import RunningRouter

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An HTTP server that takes OTLP messages; `status` is what it answers."""

    def __init__(self):
        self.spans = []
        self.status = 200

    async def _answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = int(head.split("content-length:")[1].split("\r\n")[0])
        body = await reader.readexactly(length)
        if "content-encoding: gzip" in head:
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        writer.write(
            b"HTTP/1.1 %d X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % self.status
        )
        await writer.drain()
        writer.close()

    @asynccontextmanager
    async def running(self):
        async with await asyncio.start_server(self._answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}/v1/traces"
            yield self


async def traced(nats_server, headers, **fields):
    """The spans of one placement, sent when the router ends at the latest."""
    async with Collector().running() as collector:
        fields = {"otlp_endpoint": collector.url, **fields}
        async with RunningRouter(nats_server.url, **fields).running() as router:
            await router.worker(1)
            body = {"token_ids": [*range(8)], "request_id": "r"}
            answer = await router.post("/select_and_reserve", body, headers=headers)
            assert answer.status_code == 200
        return collector.spans, answer


async def test_a_decision_is_a_span_in_its_callers_trace_with_its_stages(nats_server):
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    spans, answer = await traced(nats_server, headers)
    (whole,) = [each for each in spans if each.parent_span_id.hex() == SPAN]
    assert whole.name == "kv_router.select_and_reserve"
    assert {each.trace_id.hex() for each in spans} == {TRACE}
    assert answer.headers["traceparent"] == f"00-{TRACE}-{whole.span_id.hex()}-01"
    stages = [each for each in spans if each.parent_span_id == whole.span_id]
    assert [each.name.removeprefix("kv_router.") for each in stages] == [
        "block_hashing", "sequence_hashing", "scheduling", "find", "scheduling"
    ]  # fmt: skip
    ends = [whole.start_time_unix_nano, *(each.end_time_unix_nano for each in stages)]
    for stage, before in zip(stages, ends, strict=False):
        assert stage.start_time_unix_nano == pytest.approx(before, abs=1_000)
    assert ends[-1] == pytest.approx(whole.end_time_unix_nano, abs=1_000)
    said = {each.key: each.value for each in whole.attributes}
    assert said["kv_router.worker_id"].int_value == 1
    assert said["kv_router.isl_tokens"].int_value == 8


async def test_unsampled_trace_exports_no_spans(nats_server):
    spans, _ = await traced(nats_server, {"traceparent": f"00-{TRACE}-{SPAN}-00"}, trace_ratio=1.0)
    assert spans == []


@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (1.0, 6)])
async def test_without_a_trace_a_fraction_begins_one(nats_server, ratio, count):
    spans, _ = await traced(nats_server, {}, trace_ratio=ratio)
    assert len(spans) == count


async def test_unreachable_collector_does_not_affect_requests(nats_server):
    fields = {"otlp_endpoint": "http://127.0.0.1:1/v1/traces", "trace_ratio": 1.0}
    async with RunningRouter(nats_server.url, **fields).running() as router:
        await router.worker(1)
        for _ in range(3):
            assert (await router.post("/select", {"token_ids": [1]})).status_code == 200
