"""A router beside a Dynamo fleet, on a real NATS server, with messages that real workers sent."""

import json
from pathlib import Path

import msgspec
import pytest
from nats.js import api

from router.runtime.bus.connection import connection
from support.fleets.dynamo_bus import VECTORS
from support.processes.running import RunningRouter
from support.processes.servers import eventually

VECTORS_PATH = Path(__file__).parents[3] / "vectors"
STREAM = "namespace-ns1-component-backend-kv-events"
CORE_1_0 = "namespace.ns1.component.backend.kv-events"
CORE_1_6 = "namespace.ns1.component.backend.endpoint.generate.kv-events"
JETSTREAM_WORKER, WORKER_1_0, WORKER_1_6 = (
    16184196084411259471,
    7422925834137054389,
    2570600578682336334,
)
SETTINGS = {"dynamo_namespace": "ns1", "dynamo_component": "backend", "dynamo_block_size": 16}


@pytest.fixture
async def router(nats_server):
    async with RunningRouter(nats_server.url, **SETTINGS).running() as router:
        await eventually(lambda: router.metric("kv_router_dynamo_connected"))
        yield router


def raw(*sources):
    """Subjects and payloads of what these sources sent."""
    rows = [row for row in VECTORS if any(source in row["source"] for source in sources)]
    return [(row["subject"], bytes.fromhex(row["payload_hex"])) for row in rows]


async def make_stream(bus, **fields):
    config = api.StreamConfig(name=STREAM, subjects=[f"{STREAM}.*"], max_age=3600, **fields)
    await bus.js.add_stream(config)


async def send(bus, messages):
    for subject, payload in messages:
        if subject.startswith(STREAM):
            await bus.js.publish(subject, payload)
        else:
            await bus.client.publish(subject, payload)
    await bus.client.flush()


def event(event_id, data, worker_id=7, dp_rank=0):
    return {
        "worker_id": worker_id,
        "event": {"event_id": event_id, "data": data, "dp_rank": dp_rank},
    }


def stored(*blocks, parent=None):
    named = [{"block_hash": h, "tokens_hash": t, "mm_extra_info": None} for h, t in blocks]
    return {"stored": {"parent_hash": parent, "blocks": named}}


def envelope(payload, sequence=0, publisher_id=5, topic="kv-events"):
    return msgspec.msgpack.encode(
        {
            "publisher_id": publisher_id,
            "sequence": sequence,
            "published_at": 1,
            "topic": topic,
            "payload": msgspec.msgpack.encode(payload),
        }
    )


async def held_blocks(router, worker_id, dp_rank=0):
    view = await router.view(worker_id)
    found = [r["held_blocks"] for r in (view or {"ranks": []})["ranks"] if r["dp_rank"] == dp_rank]
    return found[0] if found else None


async def holds(router, worker_id, blocks, dp_rank=0):
    return await held_blocks(router, worker_id, dp_rank) == blocks


async def uses(router, worker_id, blocks):
    reported = (await router.view(worker_id))["ranks"][0]["reported"]
    return reported is not None and reported["kv_used_blocks"] == blocks


async def trust(router, worker_id):
    view = await router.view(worker_id)
    return view and view["ranks"][0]["trust"]


async def test_captured_workers_of_every_form_are_followed(router, bus):
    await make_stream(bus)
    await send(bus, raw("1.0.2", "1.6.1 publisher"))
    for worker_id in (JETSTREAM_WORKER, WORKER_1_0, WORKER_1_6):
        await eventually(lambda worker_id=worker_id: holds(router, worker_id, 5))
        view = await router.view(worker_id)
        assert view["endpoint"] == f"dynamo://ns1/backend/{worker_id}"
        assert (view["block_size"], view["not_schedulable_reasons"]) == (16, [])
        assert view["ranks"][0]["trust"]["state"] == "lagging"
    await send(
        bus, [(s, p) for s, p in raw("1.0.2", "1.6.1 publisher") if s.endswith("kv_metrics")]
    )
    for worker_id in (JETSTREAM_WORKER, WORKER_1_0, WORKER_1_6):
        await eventually(lambda worker_id=worker_id: uses(router, worker_id, 18))
    assert await router.metric('kv_router_dynamo_rank_total{what="refused_events"}') == 0


async def test_a_prompt_finds_the_blocks_that_hold_its_tokens(router, bus, captured_tokens):
    await send(bus, raw("1.6.1 publisher"))
    await eventually(lambda: holds(router, WORKER_1_6, 5))
    body = {"token_ids": captured_tokens}
    (overlap,) = (await router.post("/overlap_scores", body)).json()["workers"]
    assert (overlap["worker_id"], overlap["device_blocks"]) == (WORKER_1_6, 3)
    answer = (await router.post("/select", {"token_ids": [*captured_tokens, 1]})).json()
    assert (answer["worker_id"], answer["dp_rank"]) == (WORKER_1_6, 0)
    assert answer["predicted_cached_blocks"] == 3


@pytest.fixture
def captured_tokens():
    """The prompt that the captured blocks 111, 222 and 333 were made of."""
    return list(range(48))


async def test_missing_stream_is_awaited_and_never_created(router, bus):
    looked = await bus.client.subscribe(f"$JS.API.STREAM.INFO.{STREAM}")
    await looked.next_msg(timeout=60.0)
    names = {info.config.name for info in await bus.js.streams_info()}
    assert not any("ns1" in name for name in names)
    await make_stream(bus)
    before = (await bus.js.stream_info(STREAM)).config
    await send(bus, raw("1.0.2 publisher, default"))
    await eventually(lambda: holds(router, JETSTREAM_WORKER, 5))
    info = await bus.js.stream_info(STREAM)
    assert (info.config, info.state.messages) == (before, 4)
    names = {info.config.name for info in await bus.js.streams_info()}
    assert [name for name in names if "ns1" in name] == [STREAM]


async def test_a_stream_that_begins_later_is_doubted(router, bus):
    await make_stream(bus)
    await send(bus, raw("1.0.2 publisher, default")[2:])
    await eventually(lambda: holds(router, JETSTREAM_WORKER, 2))
    state = await trust(router, JETSTREAM_WORKER)
    assert (state["state"], state["reason"]) == ("degraded", "engine events lost, and no replay")


async def test_late_join_on_core_nats_is_degraded_until_a_clear(router, bus):
    await send(bus, [(CORE_1_0, envelope(event(9, stored((1, 10)))))])
    await eventually(lambda: holds(router, 7, 1))
    assert (await trust(router, 7))["state"] == "degraded"
    await send(bus, [(CORE_1_0, envelope(event(10, "cleared"), 1))])
    await eventually(lambda: holds(router, 7, 0))
    assert (await trust(router, 7))["state"] == "lagging"


async def test_worker_with_loads_but_no_events_is_blind(router, bus):
    load = {"worker_id": 7, "dp_rank": 0, "active_decode_blocks": 3, "kv_used_blocks": 4}
    metrics_1_0, metrics_1_6 = (
        "namespace.ns1.kv_metrics",
        CORE_1_6.replace("kv-events", "kv_metrics"),
    )
    await send(bus, [(metrics_1_0, envelope(load))])
    await send(bus, [(metrics_1_6, envelope({**load, "worker_id": 8}))])
    await eventually(lambda: router.view(8))
    assert await router.view(7) is None
    assert (await trust(router, 8))["state"] == "blind"
    assert await router.metric('kv_router_dynamo_fleet_total{what="unknown_loads"}') == 1


async def test_ranks_of_a_worker_appear_one_by_one_and_keep_what_they_hold(router, bus):
    await send(bus, [(CORE_1_6, envelope([event(1, stored((1, 10)))]))])
    await eventually(lambda: holds(router, 7, 1))
    second = [event(1, stored((1, 10), (2, 20)), dp_rank=3)]
    await send(bus, [(CORE_1_6, envelope(second, publisher_id=6))])
    await eventually(lambda: holds(router, 7, 2, dp_rank=3))
    assert await holds(router, 7, 1)


async def test_a_restarted_worker_holds_what_its_new_life_stored(router, bus):
    await send(bus, [(CORE_1_6, envelope([event(1, stored((1, 10), (2, 20)))]))])
    await eventually(lambda: holds(router, 7, 2))
    await send(bus, [(CORE_1_6, envelope([event(1, stored((3, 30)))], publisher_id=9))])
    await eventually(lambda: holds(router, 7, 1))
    assert (await trust(router, 7))["state"] == "lagging"


async def test_foreign_messages_are_counted_and_ignored(router, bus, caplog):
    await send(bus, [(CORE_1_6, b"\xc1"), (CORE_1_6, envelope({"v": 3}))])
    await send(bus, [(CORE_1_6, envelope([1, event(1, stored((1, 10)))]))])
    await eventually(lambda: holds(router, 7, 1))
    line = 'kv_router_dynamo_messages_total{outcome="refused",topic="kv-events"}'
    assert await router.metric(line) == 2
    await eventually(lambda: "known are Dynamo 1.0.2 and 1.6.1" in caplog.text)


async def test_a_stream_of_another_version_is_refused_in_words(router, bus, caplog):
    await make_stream(bus)
    await bus.js.publish(f"{STREAM}.kv-events", json.dumps({"version": 2}).encode())
    await send(bus, raw("1.0.2 publisher, default"))
    await eventually(lambda: holds(router, JETSTREAM_WORKER, 5))
    await eventually(lambda: "run workers of these versions" in caplog.text)


async def test_an_id_that_an_agent_has_is_not_taken_over(router, bus, caplog):
    await router.worker(7)
    await send(bus, [(CORE_1_6, envelope([event(1, stored((1, 10)))]))])
    await eventually(lambda: "another worker, not of this Dynamo component" in caplog.text)
    assert (await router.view(7))["endpoint"] == "http://w7"


async def test_silent_workers_go_and_ranks_beyond_the_limit_are_refused(nats_server, bus):
    limits = {"dynamo_silence_s": 2.5, "dynamo_max_ranks": 1}
    async with RunningRouter(nats_server.url, **SETTINGS, **limits).running() as router:
        await eventually(lambda: router.metric("kv_router_dynamo_connected"))
        for worker_id in (7, 8):
            message = [event(1, stored((1, 10)), worker_id)]
            await send(bus, [(CORE_1_6, envelope(message, publisher_id=worker_id))])
        await eventually(lambda: holds(router, 7, 1))
        assert await router.view(8) is None
        await eventually(lambda: absent(router, 7))
        assert await router.metric('kv_router_workers_gone_total{reason="silent"}') == 1


async def absent(router, worker_id):
    return await router.view(worker_id) is None


async def test_a_reader_deleted_by_dynamo_reads_on(router, bus):
    """Dynamo's routers delete the stream's consumers that they do not know."""
    await make_stream(bus)
    messages = raw("1.0.2 publisher, default")
    await send(bus, messages[:2])
    await eventually(lambda: holds(router, JETSTREAM_WORKER, 4))
    for consumer in await bus.js.consumers_info(STREAM):
        await bus.js.delete_consumer(STREAM, consumer.name)
    await send(bus, messages[2:])
    await eventually(lambda: holds(router, JETSTREAM_WORKER, 5))
    assert (await trust(router, JETSTREAM_WORKER))["state"] == "lagging"


async def test_a_purged_stream_is_gone_on_from_the_dump_of_dynamos_router(nats_server, bus):
    """The dump and the events behind it are those of one real fleet."""
    vector = json.loads((VECTORS_PATH / "dynamo_radix_state.json").read_text())
    worker_id = vector["events"][0]["worker_id"]
    await make_stream(bus)
    await bus.js.publish(f"{STREAM}.kv-events", b"purged")
    await bus.js.purge_stream(STREAM)
    store = await bus.js.create_object_store("namespace-ns1-component-backend-radix-bucket")
    await store.put("radix-state", bytes.fromhex(vector["payload_hex"]))
    later = event(4, stored((666, 60), parent=555), worker_id)
    await bus.js.publish(f"{STREAM}.kv-events", json.dumps(later).encode())
    async with RunningRouter(nats_server.url, **SETTINGS).running() as router:
        await eventually(lambda: holds(router, worker_id, 5))
        state = await trust(router, worker_id)
        assert (state["state"], state["reason"]) == (
            "degraded",
            "engine events lost, and no replay",
        )


async def test_invalid_dump_is_ignored(nats_server, bus, caplog):
    await make_stream(bus)
    await send(bus, raw("1.0.2 publisher, default"))
    await bus.js.purge_stream(STREAM, seq=2)
    store = await bus.js.create_object_store("namespace-ns1-component-backend-radix-bucket")
    await store.put("radix-state", b"[]")
    async with RunningRouter(nats_server.url, **SETTINGS).running() as router:
        await eventually(lambda: holds(router, JETSTREAM_WORKER, 2))
        assert "snapshot unusable: not a dump of Dynamo 1.0.2" in caplog.text


def said(data, request_id="r", worker_id=WORKER_1_6):
    worker = {"worker_id": worker_id, "dp_rank": 0}
    event = {"request_id": request_id, "worker": worker, "data": data, "router_id": 4}
    return envelope(event, topic="active_sequences_events")


async def test_in_shadow_mode_requests_of_dynamos_routers_are_booked_and_compared(nats_server, bus):
    async with RunningRouter(nats_server.url, **SETTINGS, shadow=True).running() as router:
        await eventually(lambda: router.metric("kv_router_dynamo_connected"))
        await send(bus, raw("1.6.1 publisher"))
        await eventually(lambda: holds(router, WORKER_1_6, 5))
        names = [15310707395893867146, 13769157705258532664, 11879827756109914528]
        subject = "namespace.ns1.component.backend.active_sequences_events"
        added = {"token_sequence": names, "isl": 51, "overlap": 3, "expected_output_tokens": None}
        await send(bus, [(subject, said({"AddRequest": added}))])
        await eventually(lambda: requests_booked(router, 1))
        (scope,) = (await router.client.get("/shadow")).json()["scopes"]
        assert (scope["compared"], scope["agreed"]) == (1, 1)
        assert scope["theirs"]["predicted_cached_tokens"] == 48
        await send(bus, [(subject, said("MarkPrefillCompleted")), (subject, said("Free"))])
        await eventually(lambda: requests_booked(router, 0))
        line = 'kv_router_dynamo_requests_total{what="freed"}'
        assert await router.metric(line) == 1


async def requests_booked(router, requests):
    view = await router.view(WORKER_1_6)
    return view["ranks"][0]["active_requests"] == requests


async def test_removed_worker_returns_with_its_next_event(router, bus):
    await send(bus, [(CORE_1_6, envelope([event(1, stored((1, 10)))]))])
    await eventually(lambda: holds(router, 7, 1))
    assert (await router.client.delete("/workers/7")).status_code == 200
    assert await router.view(7) is None
    await send(bus, [(CORE_1_6, envelope([event(2, stored((2, 20)))], 1))])
    await eventually(lambda: holds(router, 7, 1))
    assert (await trust(router, 7))["state"] == "degraded"


async def test_without_a_bus_of_its_own_the_router_lives_on_dynamos(nats_server, bus):
    settings = {**SETTINGS, "dynamo_nats_url": nats_server.url}
    async with RunningRouter("", **settings).running() as router:
        await eventually(lambda: router.metric("kv_router_dynamo_connected"))
        await send(bus, raw("1.6.1 publisher"))
        await eventually(lambda: holds(router, WORKER_1_6, 5))
        assert await router.is_ready()


async def test_required_checkpoint_is_sent_again(nats_server, bus):
    """A rank that does not fit is tried again, without a request on the bus."""
    async with RunningRouter(
        nats_server.url, **SETTINGS, index_max_blocks=1024
    ).running() as router:
        await eventually(lambda: router.metric("kv_router_dynamo_connected"))
        for worker_id, first in ((7, 0), (8, 10_000)):
            blocks = [(first + n, first + n) for n in range(1, 1001)]
            message = [event(1, stored(*blocks), worker_id)]
            await send(bus, [(CORE_1_6, envelope(message, publisher_id=worker_id))])
        await eventually(lambda: is_refused(router, 8))
        await send(bus, [(CORE_1_6, envelope([event(2, "cleared")], 1, publisher_id=7))])
        await eventually(lambda: holds(router, 8, 1000))
        await eventually(lambda: is_trusted(router, 8))


async def is_refused(router, worker_id):
    state = await trust(router, worker_id)
    return state and state["reason"] == "limit on indexed blocks reached"


async def is_trusted(router, worker_id):
    return (await trust(router, worker_id))["state"] == "lagging"


async def test_a_server_that_restarts_is_read_on_from(nats_server):
    async with (
        RunningRouter(nats_server.url, **SETTINGS).running() as router,
        connection(nats_server.url, "worker", lambda _: None) as bus,
    ):
        await make_stream(bus)
        messages = raw("1.0.2 publisher, default")
        await send(bus, messages[:2])
        await eventually(lambda: holds(router, JETSTREAM_WORKER, 4))
        nats_server.kill()
        await eventually(lambda: is_deaf(router))
        nats_server.start()
        await eventually(lambda: router.metric("kv_router_dynamo_connected"))
        await eventually(lambda: bus.client.is_connected)
        await send(bus, messages[2:])
        await eventually(lambda: holds(router, JETSTREAM_WORKER, 5))
        assert (await trust(router, JETSTREAM_WORKER))["state"] == "lagging"


async def is_deaf(router):
    return await router.metric("kv_router_dynamo_connected") == 0
