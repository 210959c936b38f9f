"""Effects on their way out: counted at once, carried out when there is a bus, bounded."""

import asyncio

from router.core.effects import (
    FetchWorker,
    ReplicaGone,
    RequestCheckpoint,
    ReservationExpired,
    TellReplica,
    WorkerGone,
)
from router.ingest.effect_runner import CAPACITY, EffectRunner
from router.observability.event_timeline import EventTimeline
from router.observability.metrics import RouterMetrics
from router.protocol.replicas import ProgressTold, ReservationFreed, decode_replica_message
from router.protocol.subjects import Subjects
from support.values.builders import rank

SUBJECTS = Subjects("test")
FREED = TellReplica(9, ProgressTold("x", ReservationFreed()))


def effect_runner():
    metrics = RouterMetrics()
    return EffectRunner(SUBJECTS, metrics), metrics


def value(metrics, name, **labels):
    return metrics.registry.get_sample_value(f"kv_router_{name}_total", labels)


async def test_bus_effects_are_carried_out(bus):
    out, _ = effect_runner()
    fetched = []

    async def fetch(worker_id):
        fetched.append(worker_id)

    wanted = await bus.client.subscribe(SUBJECTS.checkpoint_wanted(rank(1)))
    reported = await bus.client.subscribe(SUBJECTS.to_replica(9))
    out.perform([RequestCheckpoint(rank(1), "events missing"), FREED, FetchWorker(7)])
    running = asyncio.create_task(out.run(bus, fetch))
    await wanted.next_msg(timeout=60)
    assert decode_replica_message((await reported.next_msg(timeout=60)).data) == FREED.message
    assert fetched == [7]
    running.cancel()


def test_failures_are_on_the_timeline():
    timeline = EventTimeline(lambda: 0.0)
    out = EffectRunner(
        SUBJECTS, RouterMetrics(), timeline=timeline, republish=lambda each: each == rank(2)
    )
    happened = [WorkerGone(1, "silent", 3), WorkerGone(2, "withdrawn", 0), ReplicaGone(5, 4)]
    wanted = [RequestCheckpoint(rank(dp), "events missing") for dp in (1, 2)]
    out.perform([*happened, ReservationExpired("x", rank(1)), *wanted])
    reported = [(each.kind, each.severity, each.about) for each in timeline.since(0)]
    assert reported == [
        ("worker_gone", "fault", "1"),
        ("worker_gone", "note", "2"),
        ("router_gone", "fault", ""),
        ("reservation_expired", "warning", "1.0"),
        ("resync", "warning", "1.0"),
        ("resync", "warning", "2.0"),
    ]


async def test_counts_what_happened():
    out, metrics = effect_runner()
    out.perform(
        [
            WorkerGone(1, "silent", 3),
            ReplicaGone(5, 4),
            ReservationExpired("x", rank(1)),
            RequestCheckpoint(rank(1), "digest differs"),
        ]
    )
    assert value(metrics, "workers_gone", reason="silent") == 1
    assert value(metrics, "reservations_dropped", reason="worker gone") == 3
    assert value(metrics, "reservations_dropped", reason="router gone") == 4
    assert value(metrics, "reservations_dropped", reason="expired") == 1
    assert value(metrics, "checkpoints_requested", reason="digest differs") == 1


async def test_is_bounded_and_counts_what_it_drops():
    out, metrics = effect_runner()
    out.perform([FREED] * (CAPACITY + 5))
    assert value(metrics, "outbox_overflows") == 5


async def test_a_bus_that_is_away_is_counted(bus, nats_server, eventually):
    out, metrics = effect_runner()
    nats_server.kill()
    await eventually(lambda: not bus.client.is_connected)
    running = asyncio.create_task(out.run(bus, None))
    out.perform([FREED])
    failures = {"effect": "TellReplica"}
    await eventually(lambda: value(metrics, "outbox_failures", **failures) == 1)
    assert not running.done()
    running.cancel()
