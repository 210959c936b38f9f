"""SGLang's load reports, in our words."""

import asyncio

import msgspec
import zmq

from router.protocol.loads import LoadConstants, LoadCounters, LoadGauges
from router.publisher.engine_metrics.loads import EngineLoad, EngineLoads
from router.publisher.zmq.sockets import listen_to_loads

STAT = ["LoadStat", 3, 2, 1000, 64_000, 1, 700, 5000, 256, 123_456, 2_500_000]
LOAD = EngineLoad(
    LoadGauges(3, 2, 700, 63),
    LoadCounters(busy_s=2.5, prefill_tokens=123_456),
    LoadConstants(max_running_requests=256, num_blocks=4000),
)


def frames(stat, sequence=0):
    return [b"load", sequence.to_bytes(8, "big"), msgspec.msgpack.encode(stat)]


def test_load_report_is_translated():
    loads = EngineLoads(1, 16)
    assert loads.latest(0.0) == EngineLoad()
    loads.record(frames(STAT), 5.0)
    assert loads.latest(7.9) == LOAD


def test_of_a_stale_report_only_totals_and_constants_are_left():
    loads = EngineLoads(1, 16)
    loads.record(frames(STAT), 5.0)
    assert loads.latest(8.1) == EngineLoad(LoadGauges(), LOAD.counters, LOAD.constants)


def test_older_and_newer_reports_are_read():
    loads = EngineLoads(1, 16)
    loads.record(frames(STAT[:5]), 0.0)
    assert loads.latest(0.0).gauges == LoadGauges(3, 2, 0, 63)
    loads.record(frames([*STAT, "new"]), 0.0)
    assert loads.latest(0.0) == LOAD


def test_garbage_and_other_ranks_are_counted_and_dropped():
    loads = EngineLoads(0, 16)
    for garbage in ([b"load"], frames({"a": 1}), [b"load", b"", b"\xc1"], frames(["LoadStat", -1])):
        loads.record(garbage, 0.0)
    loads.record(frames(STAT), 0.0)
    assert (loads.garbage, loads.foreign, loads.reports) == (4, 1, 0)


async def test_reports_arrive_over_the_socket(eventually):
    loads = EngineLoads(1, 16)
    with zmq.Context() as context:
        publisher = context.socket(zmq.PUB)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        task = asyncio.create_task(
            listen_to_loads(context, f"tcp://127.0.0.1:{port}", loads, lambda: 0.0)
        )

        async def is_heard():
            publisher.send_multipart(frames(STAT))
            return loads.reports

        await eventually(is_heard)
        assert loads.latest(0.0) == LOAD
        task.cancel()
        await asyncio.wait([task])
        publisher.close(0)


def test_a_report_that_was_read_elsewhere_goes_stale_too():
    loads = EngineLoads(1, 16)
    loads.note(LOAD, 5.0)
    assert (loads.latest(8.0), loads.latest(8.1).gauges) == (LOAD, LoadGauges())
