"""Registering workers over HTTP: as recorded of the peer, and every way to get it wrong."""

import json
import re
from pathlib import Path

import pytest

from support.fleets.direct import DirectEngine, DirectRouter, direct_router
from support.fleets.recorded_engines import RecordedEngines
from support.processes.servers import equals

VECTORS = Path(__file__).parents[3] / "vectors" / "selection_service_workers.json"


@pytest.fixture
async def router():
    async with DirectRouter().running() as router:
        yield router


async def register(router, **fields):
    body = {"worker_id": 1, "endpoint": "http://w1", "block_size": 4, **fields}
    return await router.post("/workers", body)


# ── As recorded ──────────────────────────────────────────────────────────────────────────────────


def agrees(said, recorded):
    """Every recorded field is there and equal; lists of workers in any order."""
    if isinstance(recorded, list):
        ours = {worker["worker_id"]: worker for worker in said}
        theirs = {worker["worker_id"]: worker for worker in recorded}
        return ours.keys() == theirs.keys() and all(agrees(ours[i], theirs[i]) for i in theirs)
    return all(said[field] == value for field, value in recorded.items())


async def test_every_recorded_exchange_is_answered_alike(router):
    with RecordedEngines() as engines:
        for exchange in json.loads(VECTORS.read_text()):
            body = json.loads(engines.live(json.dumps(exchange["request"])))
            answer = await router.client.request(exchange["method"], exchange["path"], json=body)
            assert answer.status_code == exchange["status"], exchange["note"]
            said = json.loads(engines.recorded(answer.text)) if answer.content else None
            if answer.status_code < 400:
                assert agrees(said, exchange["response"]), (exchange["note"], said)
            elif answer.status_code == 404:
                assert said["error"] == exchange["response"]["error"]


async def test_registered_layout_of_a_hybrid_model_is_shown(router):
    layout = {"chunk_tokens": 8192, "eagle_groups": [1], "silent_block_sizes": []}
    answer = await register(router, hybrid=layout)
    assert (answer.status_code, answer.json()["hybrid"]) == (201, layout)
    assert (await router.view(1))["hybrid"] == layout
    both = await register(router, hybrid=layout, is_eagle=True)
    assert (both.status_code, "hybrid.eagle_groups" in both.text) == (422, True)
    patched = await router.client.patch("/workers/1", json={"is_eagle": True})
    assert (patched.status_code, "hybrid.eagle_groups" in patched.text) == (422, True)


async def test_registered_engines_share_blocks_by_vllms_own_tier(router):
    places = {n: {"0": [f"vllm-p2p://10.0.0.{n}:5710"]} for n in (1, 2)}
    for worker_id, addresses in places.items():
        unread = {"worker_id": worker_id, "endpoint": f"http://w{worker_id}", "block_size": 4}
        answer = await router.post("/workers", {**unread, "block_addresses": addresses})
        assert (answer.status_code, answer.json()["block_addresses"]) == (201, addresses)
    booked = {"token_ids": [1] * 9, "request_id": "x", "worker_id": 2, "dp_rank": 0}
    assert (await router.post("/reservations", booked)).status_code < 300
    body = {"token_ids": [1] * 9, "allowed_worker_ids": [1]}
    source = (await router.post("/select", body)).json()["source"]
    remote = {"remote_host": "10.0.0.2", "remote_port": 5710}
    assert (source["worker_id"], source["remote_kv_source"]) == (2, remote)


# ── Incomplete ───────────────────────────────────────────────────────────────────────────────────


async def test_an_incomplete_worker_is_shown_and_never_chosen(router):
    answer = await router.post("/workers", {"worker_id": 7})
    assert (answer.status_code, answer.json()["lifecycle"]) == (201, "incomplete")
    assert (await router.view(7))["not_schedulable_reasons"] == [
        "endpoint is required",
        "block_size must be greater than 0",
        "kv_events endpoint is required for dp_rank 0",
    ]
    assert (await router.post("/select", {"token_ids": [1]})).status_code == 503
    answer = await router.client.get("/ready")
    assert answer.status_code == 503
    reason = answer.json()["reason"]
    assert reason.startswith("no schedulable workers; worker 7: endpoint is required; block_size")


async def test_missing_fields_can_be_added(router, eventually):
    with DirectEngine(7) as engine:
        await router.post("/workers", {"worker_id": 7, "block_size": 4})
        patch = {"endpoint": "http://w7", "kv_events_endpoint": engine.endpoint(0)}
        answer = await router.client.patch("/workers/7", json=patch)
        assert answer.json()["lifecycle"] == "schedulable"
        patch = {"replay_endpoint": engine.replay_endpoint(0)}
        assert (await router.client.patch("/workers/7", json=patch)).status_code == 200
        await router.until_exact(7)
        answer = await router.client.patch("/workers/7", json={"block_size": 0})
        assert answer.json()["lifecycle"] == "incomplete"
        assert (await router.post("/select", {"token_ids": [1]})).status_code == 503


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size must be greater than 0"),
        (
            {"kv_events_endpoints": {"0": "tcp://127.0.0.1:1", "3": "tcp://127.0.0.1:2"}},
            "dp_rank 3 is none of 0 to 0",
        ),
        (
            {
                "data_parallel_size": 2,
                "kv_events_endpoints": {"0": "tcp://127.0.0.1:1", "1": "tcp://127.0.0.1:2"},
                "replay_endpoint": "tcp://127.0.0.1:3",
            },
            "replay_endpoint is supported only for data_parallel_size 1; replay_endpoints names "
            "one for each dp_rank",
        ),
    ],
)
async def test_contradictory_registration_is_incomplete(router, fields, reason):
    answer = await register(router, **fields)
    assert (answer.status_code, answer.json()["lifecycle"]) == (201, "incomplete")
    assert reason in answer.json()["not_schedulable_reasons"]


async def test_without_events_a_registered_engine_is_schedulable_at_once():
    async with DirectRouter(use_kv_events=False).running() as router:
        assert (await register(router)).json()["lifecycle"] == "schedulable"
        answer = await router.post("/select", {"token_ids": [1]})
        assert answer.json()["worker_id"] == 1


# ── Bad input ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"kv_events_endpoints": {"0": "127.0.0.1:5557"}}, "kv_events_endpoints.0"),
        ({"kv_events_endpoints": {"0": "tcp://127.0.0.1:99999"}}, "kv_events_endpoints.0"),
        ({"kv_events_endpoints": {"0": "tcp://*:5557"}}, "kv_events_endpoints.0"),
        ({"kv_events_endpoints": {"0": "tcp://0.0.0.0:5557"}}, "kv_events_endpoints.0"),
        ({"kv_events_endpoints": {"0": "tcp://8.8.8.8:5557"}}, "kv_events_endpoints.0"),
        ({"kv_events_endpoints": {"0": "tcp://[2001:4860:4860::8888]:1"}}, "kv_events_endpoints.0"),
        ({"kv_events_endpoint": "http://127.0.0.1:1"}, "kv_events_endpoint"),
        ({"replay_endpoint": "nonsense"}, "replay_endpoint"),
        ({"replay_endpoints": {"0": "tcp://1.1.1.1:5558"}}, "replay_endpoints.0"),
        ({"load_endpoints": {"0": "tcp://1.1.1.1:5559"}}, "load_endpoints.0"),
        ({"block_addresses": {"0": ["10.0.0.1:5710"]}}, "block_addresses.0"),
        ({"kv_events_endpoints": {"x": "tcp://127.0.0.1:1"}}, None),
        ({"engine": "tgi"}, "engine"),
        ({"report_mode": "some"}, "report_mode"),
        ({"worker_id": 2**64}, None),
        ({"total_kv_blocks": 2**63}, "total_kv_blocks"),
        ({"max_num_batched_tokens": 10**400}, "max_num_batched_tokens"),
        ({"worker_id": "seven"}, "worker_id"),
        ({"block_size": 65_537}, "block_size"),
        ({"data_parallel_size": 1025}, "data_parallel_size"),
        ({"routing_group": "a", "tenant_id": "b"}, None),
    ],
)
async def test_bad_registrations_say_which_field_and_what_is_allowed(router, fields, field):
    answer = await register(router, **fields)
    said = answer.json()
    assert (answer.status_code, said["code"]) == (422, "invalid_field")
    assert field in (None, said["field"])
    assert said["reason"]
    assert said["allowed"]
    assert (await router.client.get("/workers")).json() == []


async def test_public_addresses_may_be_allowed():
    async with DirectRouter(allow_public_engines=True).running() as router:
        answer = await register(router, kv_events_endpoint="tcp://192.0.2.1:1")
        assert answer.status_code == 201
        answer = await register(router, kv_events_endpoint="tcp://8.8.8.8:1")
        assert answer.status_code == 201


async def test_one_socket_is_read_for_one_rank_of_a_scope(router):
    sockets = {"0": "tcp://127.0.0.1:1", "1": "tcp://127.0.0.1:2"}
    fields = {"data_parallel_size": 2, "kv_events_endpoints": sockets}
    assert (await register(router, **fields)).status_code == 201
    for doubled in (
        {"worker_id": 2, "kv_events_endpoint": "tcp://127.0.0.1:2"},
        {"worker_id": 2, **fields, "kv_events_endpoints": {"0": sockets["0"], "1": sockets["0"]}},
        {
            "worker_id": 2,
            "kv_events_endpoint": "tcp://127.0.0.1:3",
            "replay_endpoint": sockets["1"],
        },
    ):
        answer = await register(router, **doubled)
        assert (answer.status_code, answer.json()["code"]) == (409, "doubled_endpoint")
        assert answer.json()["worker_id"] in (1, 2)
    other = {"worker_id": 2, "kv_events_endpoint": "tcp://127.0.0.1:2", "routing_group": "other"}
    assert (await register(router, **other)).status_code == 201
    assert await router.view(2)


async def test_registered_ranks_are_bounded():
    async with DirectRouter(max_registered_ranks=3).running() as router:
        two = {"0": "tcp://127.0.0.1:1", "1": "tcp://127.0.0.1:2"}
        fields = {"data_parallel_size": 2, "kv_events_endpoints": two}
        assert (await register(router, **fields)).status_code == 201
        assert (await register(router, **fields)).status_code == 201
        assert (await register(router, worker_id=2, data_parallel_size=2)).status_code == 503
        answer = await register(router, worker_id=2)
        assert answer.status_code == 201
        answer = await register(router, worker_id=3)
        assert (answer.status_code, answer.json()["code"]) == (503, "too_many_registrations")
        assert await router.metric("kv_router_registered_ranks") == 3
        assert await router.metric("kv_router_registered_ranks_max") == 3
        await router.client.delete("/workers/1")
        assert (await register(router, worker_id=3)).status_code == 201


async def test_unknown_workers_are_404(router):
    for method in ("GET", "PATCH", "DELETE"):
        answer = await router.client.request(method, "/workers/9", json={})
        assert (answer.status_code, answer.json()["error"]) == (404, "worker 9 not found")


# ── Changes ──────────────────────────────────────────────────────────────────────────────────────


async def test_orders_work_without_a_bus():
    engine = DirectEngine(1)
    async with direct_router(engine) as router:
        for order in ("cordoned", "schedulable"):
            answer = await router.client.patch("/workers/1", json={"lifecycle": order})
            assert (answer.status_code, answer.json()["lifecycle"]) == (200, order)
            expected = 200 if order == "schedulable" else 503
            assert (await router.post("/select", {"token_ids": [1]})).status_code == expected
        answer = await router.client.patch("/workers/1", json={"lifecycle": "dead"})
        assert (answer.status_code, answer.json()["field"]) == (422, "lifecycle")
        assert (await router.client.get("/routers")).json() == []


async def test_registering_again_keeps_what_is_known(eventually):
    engine = DirectEngine(1)
    async with direct_router(engine) as router:
        engine.cache(range(40))
        await eventually(lambda: equals(router.overlaps(range(40)), {(1, 0): 10}))
        replays = engine.ranks[0].replays
        await router.register(engine, endpoint="http://elsewhere", total_kv_blocks=5000)
        assert await router.overlaps(range(40)) == {(1, 0): 10}
        view = await router.view(1)
        assert (view["endpoint"], view["ranks"][0]["trust"]["state"]) == (
            "http://elsewhere",
            "exact",
        )
        assert engine.ranks[0].replays >= replays


async def test_another_identity_begins_anew(eventually):
    engine = DirectEngine(1)
    async with direct_router(engine) as router:
        engine.cache(range(40))
        await eventually(lambda: equals(router.overlaps(range(40)), {(1, 0): 10}))
        await router.register(engine, is_eagle=True)
        assert await router.overlaps(range(40)) == {(1, 0): 0}
        assert (await router.view(1))["ranks"][0]["held_blocks"] == 0


async def test_changed_model_name_republishes_all_blocks(eventually):
    engine = DirectEngine(1)
    async with direct_router(engine) as router:
        engine.cache(range(40))
        await eventually(lambda: equals(router.overlaps(range(40)), {(1, 0): 10}))
        await router.register(engine, model_name="other")
        assert await router.overlaps(range(40)) == {}
        other = {"model_name": "other"}
        await eventually(lambda: equals(router.overlaps(range(40), **other), {(1, 0): 10}))
        await router.until_exact(1)


async def test_another_socket_begins_only_its_rank_anew(eventually):
    engine, spare = DirectEngine(1, ranks=2), DirectEngine(2)
    with spare:
        async with direct_router(engine) as router:
            engine.cache(range(40), dp_rank=0)
            engine.cache(range(40), dp_rank=1)
            spare.cache(range(8))
            both = {(1, 0): 10, (1, 1): 10}
            await eventually(lambda: equals(router.overlaps(range(40)), both))
            sockets = {"0": spare.endpoint(0), "1": engine.endpoint(1)}
            replays = {"0": spare.replay_endpoint(0), "1": engine.replay_endpoint(1)}
            await router.register(engine, kv_events_endpoints=sockets, replay_endpoints=replays)
            assert (await router.overlaps(range(40)))[1, 1] == 10
            await eventually(lambda: equals(router.overlaps(range(40)), {(1, 0): 2, (1, 1): 10}))
            await router.until_exact(1)
            assert await router.metric("kv_router_load_reports_stale_total") == 0


async def followed(router):
    """Ids of the workers whose engines are read."""
    text = (await router.client.get("/metrics")).text
    return set(re.findall(r'kv_engine_condition\{.*worker_id="(\d+)"', text))


async def test_a_removed_worker_leaves_nothing_behind(eventually):
    one, two = DirectEngine(1, ranks=2), DirectEngine(2)
    async with direct_router(one, two) as router:
        one.cache(range(40))
        await eventually(
            lambda: equals(router.overlaps(range(40)), {(1, 0): 10, (1, 1): 0, (2, 0): 0})
        )
        body = {"token_ids": list(range(40)), "request_id": "r1"}
        assert (await router.post("/select_and_reserve", body)).json()["worker_id"] == 1
        answer = await router.client.delete("/workers/1")
        assert (answer.status_code, answer.json()["lifecycle"]) == (200, "unschedulable")
        assert await router.overlaps(range(40)) == {(2, 0): 0}
        assert (await router.client.delete("/reservations/r1")).status_code == 404
        assert await followed(router) == {"2"}
        for rank in one.ranks:
            rank.publish()
            rank.wait()  # replays that were under way have been counted
            replays = rank.replays
            rank.publish()
            rank.wait()
            assert rank.replays == replays
        await router.register(one)
        await router.until_exact(1)
        assert (await router.overlaps(range(40)))[1, 0] == 10


# ── Beside announced workers ─────────────────────────────────────────────────────────────────────


async def test_announced_and_registered_workers_serve_together(nats_server, eventually):
    engine = DirectEngine(2)
    with engine:
        engine.cache(range(40))
        async with DirectRouter(nats_url=nats_server.url).running() as router:
            await router.worker(1)
            await router.register(engine)
            await router.until_exact(2)
            assert await router.overlaps(range(40)) == {(1, 0): 0, (2, 0): 10}
            for method, body in (("PATCH", {"block_size": 8}), ("DELETE", None)):
                answer = await router.client.request(method, "/workers/1", json=body)
                assert (answer.status_code, answer.json()["code"]) == (409, "worker_announced")
            answer = await register(router)
            assert (answer.status_code, answer.json()["code"]) == (409, "worker_announced")
            nats_server.kill()

            async def trust():
                workers = (await router.client.get("/workers")).json()
                return {w["worker_id"]: w["ranks"][0]["trust"]["state"] for w in workers}

            await eventually(lambda: equals(trust(), {1: "lagging", 2: "exact"}))


async def test_an_announcement_takes_the_place_of_a_registration(nats_server, eventually):
    engine = DirectEngine(1)
    with engine:
        engine.cache(range(40))
        async with DirectRouter(nats_url=nats_server.url).running() as router:
            await router.register(engine)
            await eventually(lambda: equals(router.overlaps(range(40)), {(1, 0): 10}))
            await router.worker(1)
            assert await router.overlaps(range(40)) == {(1, 0): 0}
            await eventually(lambda: equals(followed(router), set()))
            assert (await router.view(1))["kv_events_endpoints"] == {}
