"""Snapshots on a real bus: a start is quicker with them, and never wrong."""

import asyncio
from contextlib import AsyncExitStack

import numpy as np
import pytest

from router.ingest import snapshots
from router.ingest.object_store import ObjectBucket
from router.protocol.events import Checkpoint, TierBlocks, encode_log_message
from router.protocol.hybrid import LayerClass, Layout
from router.protocol.values import HeldState, Tier, pack_hashes
from router.runtime.bus.connection import StreamLimits
from router.runtime.bus.transport import NatsTransport
from router.sequence.hashing._digest import digest
from support.processes.running import SUBJECTS, RunningRouter
from support.processes.servers import equals
from support.values.builders import IDENTITY, rank
from support.values.indexing import RunningIndex, announced

UNUSABLE = 'kv_router_snapshots_unusable_total{{reason="{}"}}'
RESTORED, WRITTEN = "kv_router_snapshots_restored_total", "kv_router_snapshots_written_total"
BLOCKS = list(range(1, 11))


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(snapshots, "CHECK_S", 0.1)


@pytest.fixture
def stored_object(bus):
    return ObjectBucket(
        bus, SUBJECTS.snapshot_bucket, SUBJECTS.snapshot_object, limit_bytes=1 << 20
    )


@pytest.fixture
async def worker(bus):
    async with announced(bus, 1, data_parallel_size=2) as worker:
        yield worker


async def cache(worker, *blocks, dp_rank=0):
    """One message."""
    journal = worker.journals[rank(1, dp_rank)]
    journal.stored(Tier.DEVICE, list(blocks), None if blocks[0] == 1 else blocks[0] - 1)
    await worker.deliver(rank(1, dp_rank))


async def held(router, dp_rank=0):
    """What the router believes that a rank holds, if it is sure of it."""
    views = (await router.client.get("/workers")).json()
    ranks = [each for view in views if view["worker_id"] == 1 for each in view["ranks"]]
    if not ranks or ranks[dp_rank]["trust"]["state"] != "exact":
        return None
    return ranks[dp_rank]["held_blocks"]


async def applied(router):
    """How many messages of the event log were read since the start."""
    text = (await router.client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("kv_router_log_messages_total{")]
    return sum(float(line.split()[-1]) for line in lines)


async def take_snapshot(nats_server, worker, eventually, **settings):
    """A router that follows the worker, writes a snapshot, and ends."""
    async with RunningRouter(nats_server.url, snapshot_threshold=3, **settings).running() as router:
        for block in BLOCKS[:-1]:
            await cache(worker, block)
        await eventually(lambda: written(router))
        await cache(worker, BLOCKS[-1])
        await eventually(lambda: equals(held(router), 10))


async def is_above(answer, least):
    return await answer > least


async def written(router):
    return (await router.metric(WRITTEN)) or 0


async def test_a_start_goes_on_from_a_snapshot(nats_server, worker, eventually):
    await take_snapshot(nats_server, worker, eventually)
    await cache(worker, 11)
    async with RunningRouter(nats_server.url).running() as router:
        await eventually(lambda: equals(held(router), 11))
        assert await held(router, dp_rank=1) == 0
        assert await router.metric(RESTORED) == 1
        assert await router.metric("kv_router_snapshot_restored_blocks_total") >= 3
        assert await applied(router) < 9
        await cache(worker, 12)
        await eventually(lambda: equals(held(router), 12))


async def test_a_hybrid_rank_is_restored_with_its_classes(nats_server, worker, eventually):
    journal = worker.journals[rank(1)]
    journal.set_layout(Layout(4, 4, (LayerClass("window", 4, 9),)))
    journal.class_stored(0, np.array([3, 4], np.uint64))
    await take_snapshot(nats_server, worker, eventually)
    async with RunningRouter(nats_server.url).running() as router:
        await eventually(lambda: equals(held(router), 10))
        view = (await router.client.get("/workers/1")).json()["ranks"][0]
        assert [each["blocks"] for each in view["layout"]["classes"]] == [2]
        assert await router.metric(RESTORED) == 1
        assert await applied(router) < 9


async def test_an_index_alone_restores_them_too(nats_server, worker, eventually):
    await take_snapshot(nats_server, worker, eventually)
    async with RunningIndex(nats_server.url).running() as index:
        await eventually(index.is_ready)
        await eventually(lambda: equals(index.status(1), "active"))
        assert await index.metric(RESTORED) == 1
        assert await applied(index) < 9


async def test_snapshot_older_than_checkpoints_is_updated(nats_server, worker, eventually):
    await take_snapshot(nats_server, worker, eventually)
    for journal in worker.journals.values():
        journal.cleared()
        journal.stored(Tier.HOST, [7], None)
        journal.require_checkpoint()
    await worker.deliver()
    await cache(worker, 1)
    async with RunningRouter(nats_server.url).running() as router:
        await eventually(lambda: equals(held(router), 2))
        await eventually(lambda: equals(held(router, dp_rank=1), 1))
        assert await router.metric(RESTORED) == 1


async def test_rank_missing_from_a_snapshot_requests_a_checkpoint(
    nats_server, bus, worker, eventually
):
    await take_snapshot(nats_server, worker, eventually)
    async with announced(bus, 2) as other, RunningRouter(nats_server.url).running() as router:
        await eventually(lambda: router.trusts(2))
        assert await router.metric(RESTORED) == 1
        assert other.journals[rank(2)].last_event_id == 0


async def answer_requests(worker):
    """As an agent does, for its first rank."""
    requests = await worker.bus.client.subscribe(SUBJECTS.checkpoint_wanted(rank(1)))
    async for _ in requests.messages:
        worker.journals[rank(1)].require_checkpoint()
        await worker.deliver(rank(1))


async def test_reset_ignores_snapshots_and_history(
    nats_server, bus, worker, stored_object, eventually, caplog
):
    await take_snapshot(nats_server, worker, eventually)
    messages = (await bus.js.stream_info(SUBJECTS.event_stream)).state.messages
    async with RunningRouter(nats_server.url, reset_state=True).running() as router:
        await eventually(router.is_ready)
        assert await stored_object.read() is None
        assert (await bus.js.stream_info(SUBJECTS.event_stream)).state.messages == messages
        assert await held(router) is None
        answering = asyncio.create_task(answer_requests(worker))
        await eventually(lambda: equals(held(router), 10))
        answering.cancel()
        assert await held(router, dp_rank=1) is None
        assert await applied(router) < 9


async def test_a_snapshot_of_another_stream_is_of_no_use(nats_server, bus, worker, eventually):
    await take_snapshot(nats_server, worker, eventually)
    await bus.js.delete_stream(SUBJECTS.event_stream)
    for journal in worker.journals.values():
        journal.require_checkpoint()
    await worker.deliver()
    async with RunningRouter(nats_server.url).running() as router:
        await eventually(lambda: equals(held(router), 10))
        assert await router.metric(UNUSABLE.format("other stream")) == 1
        assert await router.metric(RESTORED) == 0


@pytest.mark.parametrize(
    ("damage", "reason"), [("chunks", "torn"), ("bytes", "foreign"), ("limit", "too large")]
)
async def test_unusable_snapshot_is_ignored(
    nats_server, bus, worker, stored_object, eventually, monkeypatch, damage, reason
):
    await take_snapshot(nats_server, worker, eventually)
    if damage == "chunks":
        stream = f"OBJ_{SUBJECTS.snapshot_bucket}"
        await bus.js.purge_stream(stream, subject=f"$O.{SUBJECTS.snapshot_bucket}.C.>")
    elif damage == "bytes":
        await stored_object.write(memoryview(b"not a snapshot, and a little longer than one"))
    else:
        monkeypatch.setattr(snapshots, "LIMIT_BYTES", 10)
    async with RunningRouter(nats_server.url, snapshot_threshold=10_000).running() as router:
        await eventually(lambda: equals(held(router), 10))
        assert await router.metric(UNUSABLE.format(reason)) == 1


async def test_a_start_does_not_wait_for_long(nats_server, worker, eventually, monkeypatch):
    async def read_forever(_):
        await asyncio.Event().wait()

    await take_snapshot(nats_server, worker, eventually)
    monkeypatch.setattr(snapshots, "RESTORE_S", 0.5)
    monkeypatch.setattr(ObjectBucket, "read", read_forever)
    async with RunningRouter(nats_server.url, snapshot_threshold=10_000).running() as router:
        is_ready = await router.is_ready()
        assert not is_ready or await router.metric(UNUSABLE.format("slow")) == 1
        await eventually(lambda: equals(held(router), 10))
        assert await router.metric(UNUSABLE.format("slow")) == 1


async def test_a_threshold_of_zero_neither_writes_nor_reads(nats_server, worker, eventually):
    await take_snapshot(nats_server, worker, eventually)
    async with RunningRouter(nats_server.url, snapshot_threshold=0).running() as router:
        await eventually(lambda: equals(held(router), 10))
        assert await router.metric(RESTORED) == 0
        await asyncio.sleep(0.5)
        assert await written(router) == 0


async def test_the_router_of_the_lowest_id_writes(nats_server, worker, eventually):
    async with AsyncExitStack() as stack:
        routers = []
        for name in "abc":
            running = RunningRouter(nats_server.url, name=name, snapshot_threshold=3)
            routers.append(await stack.enter_async_context(running.running()))
        routers.sort(key=lambda router: router.config.router_id)
        await eventually(lambda: all_know(routers))
        for block in BLOCKS:
            await cache(worker, block)
        await eventually(lambda: written(routers[0]))
        first = await written(routers[0])
        for block in (11, 12, 13, 14):
            await cache(worker, block)
        await eventually(lambda: is_above(written(routers[0]), first))
        assert [await written(router) for router in routers[1:]] == [0, 0]


async def all_know(routers):
    answers = [(await router.client.get("/routers")).json() for router in routers]
    return all(len(answer) == len(routers) for answer in answers)


async def test_a_bus_that_takes_no_snapshot_is_counted_and_asked_again(
    nats_server, worker, stored_object, eventually, monkeypatch
):
    monkeypatch.setattr(snapshots, "RETRY_S", 0.2)
    monkeypatch.setattr(snapshots, "LIMIT_BYTES", 10)
    async with RunningRouter(nats_server.url, snapshot_threshold=3).running() as router:
        for block in BLOCKS:
            await cache(worker, block)
        await eventually(lambda: failures(router))
        monkeypatch.setattr(snapshots, "LIMIT_BYTES", 1 << 20)
        await eventually(lambda: written(router))
        assert await router.metric("kv_router_snapshot_bytes_total") == len(
            await stored_object.read()
        )


async def failures(router):
    return await router.metric("kv_router_snapshot_failures_total")


@pytest.mark.parametrize(
    ("workers", "blocks"), [(60, 2_000), pytest.param(100, 10_000, marks=pytest.mark.long)]
)
async def test_a_late_router_reads_the_blocks_of_many_workers(
    bus, nats_server, eventually, workers, blocks
):
    """From checkpoints, and from a snapshot."""
    transport = NatsTransport(bus, SUBJECTS, StreamLimits())
    slow = {"snapshot_threshold": 50, "worker_silence_s": 60.0}  # all of them share this process
    async with AsyncExitStack() as stack:
        for worker_id in range(1, workers + 1):
            await stack.enter_async_context(announced(bus, worker_id))
            message = checkpoint(rank(worker_id), worker_id << 32, blocks)
            subject = SUBJECTS.events(rank(worker_id))
            await transport.append(
                subject,
                encode_log_message(message),
                expected_sequence=await transport.last_sequence(subject),
                replaces_history=True,
            )
        for restored in (0, 1):
            async with RunningRouter(nats_server.url, **slow).running() as late:
                await eventually(lambda late=late: late.is_ready())
                await eventually(lambda late=late: equals(held_of_all(late), workers * [blocks]))
                assert await late.metric(RESTORED) == restored
                if not restored:
                    await eventually(lambda late=late: written(late))


async def held_of_all(router):
    """By what is trusted, though not that all of it is of this second."""
    views = (await router.client.get("/workers")).json()
    ranks = [view["ranks"][0] for view in views]
    return [r["held_blocks"] for r in ranks if r["trust"]["state"] in ("exact", "lagging")]


def checkpoint(of, first, blocks):
    hashes = np.arange(first, first + blocks, dtype=np.uint64)
    state = HeldState(counts=(blocks, 0, 0, 0), digests=(digest(hashes), 0, 0, 0))
    held = (TierBlocks(Tier.DEVICE, pack_hashes(hashes)),)
    return Checkpoint(of.worker_id, of.dp_rank, 1, IDENTITY, 1, 0, 1, held, state)
