"""What a selection service offers beyond what was recorded: pending selections, hashes, headers."""

import asyncio

import numpy as np
import pytest

from router.protocol.requests import PromptRequest
from router.protocol.values import SCHEME, Identity
from router.sequence.active.prompt import Prompt
from router.sequence.hashing.block_hashes import local_block_hashes, token_array
from support.fleets.direct import DirectEngine, DirectRouter, direct_router
from support.processes.servers import equals

PROMPT = list(range(10))
IDENTITY = Identity(SCHEME, 4)


@pytest.fixture
async def router(eventually):
    """Worker 1 holds two blocks of the prompt."""
    engine = DirectEngine(1)
    async with direct_router(engine) as router:
        engine.cache(PROMPT[:8])
        await eventually(lambda: equals(router.overlaps(PROMPT), {(1, 0): 2}))
        yield router


@pytest.fixture
async def plain():
    """One worker with an empty cache."""
    async with DirectRouter(use_kv_events=False).running() as router:
        body = {"worker_id": 1, "endpoint": "http://w1:80/v1", "block_size": 4}
        assert (await router.post("/workers", body)).status_code == 201
        yield router


async def active_requests(router):
    (scope,) = (await router.client.get("/loads")).json()
    return sum(load["active_requests"] for load in scope["loads"])


# ── Pending selections ───────────────────────────────────────────────────────────────────────────


async def test_a_selection_is_booked_as_it_was_chosen(router):
    body = {"token_ids": PROMPT, "selection_id": "s", "expected_output_tokens": 8}
    selected = (await router.post("/select", body)).json()
    assert selected["selection_id"] == "s"
    assert await active_requests(router) == 0
    answer = await router.post("/reservations", {"selection_id": "s"})
    assert (answer.status_code, answer.json()["worker_id"]) == (201, 1)
    (load,) = (await router.client.get("/loads")).json()[0]["loads"]
    assert load["potential_prefill_tokens"] == selected["effective_prefill_tokens"] == 2
    assert load["potential_decode_blocks"] == 3
    answer = await router.post("/reservations", {"selection_id": "s"})
    assert (answer.status_code, answer.json()["code"]) == (404, "selection_not_found")
    assert (await router.client.delete("/reservations/s")).status_code == 200
    assert await router.metric('kv_router_selections_ended_total{outcome="reserved"}') == 1


async def test_a_selection_that_can_not_be_booked_is_still_pending(plain):
    await plain.post("/select", {"token_ids": PROMPT, "selection_id": "s"})
    await plain.post("/select_and_reserve", {"token_ids": PROMPT, "selection_id": "s"})
    assert (await plain.post("/reservations", {"selection_id": "s"})).status_code == 409
    await plain.client.delete("/reservations/s")
    assert (await plain.post("/reservations", {"selection_id": "s"})).status_code == 201


async def test_only_selections_with_an_id_are_kept(plain):
    headers = {"x-request-id": "h"}
    await plain.post("/select", {"token_ids": PROMPT}, headers=headers)
    await plain.post("/select", {"token_ids": PROMPT, "request_id": "r"})
    assert await plain.metric("kv_router_selections") == 0
    await plain.post("/select", {"token_ids": PROMPT, "selection_id": "s", "request_id": "r"})
    assert await plain.metric("kv_router_selections") == 1


async def test_pending_selections_are_bounded_and_expire(eventually):
    limits = {"selection_cache_max_entries": 2, "selection_cache_ttl_s": 0.2}
    async with DirectRouter(use_kv_events=False, **limits).running() as router:
        await router.post("/workers", {"worker_id": 1, "endpoint": "http://w1", "block_size": 4})
        for name in "abc":
            await router.post("/select", {"token_ids": PROMPT, "selection_id": name})
        assert (await router.post("/reservations", {"selection_id": "a"})).status_code == 404
        assert await router.metric('kv_router_selections_ended_total{outcome="evicted"}') == 1
        await eventually(lambda: equals(router.metric("kv_router_selections"), 0))
        assert (await router.post("/reservations", {"selection_id": "c"})).status_code == 404


# ── Hashes instead of tokens ─────────────────────────────────────────────────────────────────────


def hashed():
    """The prompt's hashes as signed numbers, as some callers compute them."""
    blocks = local_block_hashes(token_array(PROMPT), 4).view(np.int64).tolist()
    prompt = Prompt(PromptRequest(token_ids=PROMPT)).hashed(IDENTITY)
    sequence = prompt.sequence_hashes.view(np.int64).tolist()
    return {"block_hashes": blocks, "sequence_hashes": sequence, "isl_tokens": len(PROMPT)}


async def test_hashes_find_what_tokens_find(router):
    by_tokens = (await router.post("/select", {"token_ids": PROMPT})).json()
    by_hashes = (await router.post("/select", hashed())).json()
    for each in (by_tokens, by_hashes):
        del each["trust"]
    assert by_hashes == by_tokens
    scores = (await router.post("/overlap_scores", hashed())).json()
    assert [each["device_blocks"] for each in scores["workers"]] == [2]


async def test_names_of_the_callers_own_are_for_bookings_alone(router):
    own = {**hashed(), "sequence_hashes": [77, -5], "selection_id": "s"}
    selected = (await router.post("/select", own)).json()
    assert selected["overlap"]["gpu"] == 8
    await router.post("/reservations", {"selection_id": "s"})
    own = {**own, "selection_id": "again"}
    booked = (await router.post("/select_and_reserve", own)).json()
    assert booked["sequence_hashes"] == [77, -5]
    (load,) = (await router.client.get("/loads")).json()[0]["loads"]
    assert load["potential_decode_blocks"] == 4  # two they share, and an incomplete one each


async def test_booking_response_is_a_valid_request(plain):
    booked = (await plain.post("/select_and_reserve", {"token_ids": PROMPT})).json()
    said = {name: booked[name] for name in ("sequence_hashes", "isl_tokens")}
    assert said == {name: hashed()[name] for name in said}
    assert booked["track_prefill_tokens"] is True
    assert (await plain.post("/select", said)).status_code == 200


@pytest.mark.parametrize(
    ("change", "field", "status"),
    [
        ({"sequence_hashes": None}, "sequence_hashes", 400),
        ({"sequence_hashes": [1]}, "block_hashes", 400),
        ({"isl_tokens": None}, "isl_tokens", 400),
        ({"isl_tokens": 32}, "sequence_hashes", 400),
        ({"isl_tokens": 7}, "sequence_hashes", 400),
        ({"isl_tokens": -1}, "isl_tokens", 422),
        ({"isl_tokens": 10**9}, "isl_tokens", 413),
        ({"sequence_hashes": [2**64, 0]}, "sequence_hashes", 422),
        ({"block_hashes": [0, 2**64]}, "block_hashes", 422),
        ({"block_hashes": [0, -(2**63) - 1]}, "block_hashes[1]", 422),
        ({"block_hashes": [0, 1.5]}, "block_hashes[1]", 422),
    ],
)
async def test_hashes_that_can_not_be_true_are_refused(plain, change, field, status):
    answer = await plain.post("/select", hashed() | change)
    said = answer.json()
    assert (answer.status_code, said["field"]) == (status, field)
    assert said["allowed"]


async def test_hashes_of_another_block_size_are_refused_with_words(plain):
    body = {"sequence_hashes": [1, 2, 3, 4, 5], "isl_tokens": 10}
    said = (await plain.post("/select", body)).json()
    assert said["reason"] == "5 for 10 tokens, where blocks have 4 tokens"
    assert said["allowed"] == "2"


# ── What else is asked and answered ──────────────────────────────────────────────────────────────


async def test_advisory_adds_the_load_of_the_chosen_rank(plain):
    body = {"token_ids": PROMPT, "advisory": True}
    load = (await plain.post("/select", body)).json()["worker_load"]
    assert load == {
        "active_prefill_tokens": 0, "prefill_token_capacity": 0, "total_kv_blocks": 0,
        "active_decode_blocks": 0,
    }  # fmt: skip
    await plain.post("/select_and_reserve", body)
    load = (await plain.post("/select", body)).json()["worker_load"]
    assert load["active_prefill_tokens"] == 10


async def test_unknown_fields_are_warned_of_and_counted(plain):
    said = (await plain.post("/select", {"token_ids": PROMPT, "foo": 1, "bar": 2})).json()
    assert said["warnings"] == [
        "field 'bar' is unknown, and ignored",
        "field 'foo' is unknown, and ignored",
    ]
    assert "warnings" not in (await plain.post("/select", {"token_ids": PROMPT})).json()
    body = {"worker_id": 2, "block_size": 4, "endpoint": "http://w2", "foo": 1}
    assert (await plain.post("/workers", body)).json()["warnings"]
    count = 'kv_router_unknown_fields_total{interface="http",route="/select"}'
    assert await plain.metric(count) == 2


@pytest.mark.parametrize("path", ["/select", "/select_and_reserve", "/overlap_scores", "/workers"])
async def test_a_field_that_is_there_twice_is_refused(plain, path):
    content = b'{"model_name":"m","model_name":"x","worker_id":1,"token_ids":[1]}'
    headers = {"content-type": "application/json"}
    answer = await plain.client.post(path, content=content, headers=headers)
    assert (answer.status_code, answer.json()["field"]) == (422, "model_name")


async def test_proxies_get_a_choice_as_headers(plain):
    for path in ("/select", "/select_and_reserve"):
        body = {"token_ids": PROMPT, "request_id": "r 1"}
        answer = await plain.post(f"{path}?answer=headers", body)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["x-gateway-destination-endpoint"] == "w1:80"
        assert answer.headers["x-data-parallel-rank"] == "0"
        assert answer.headers["x-worker-id"] == "1"
        assert answer.headers["x-request-id"] == "r1"
    answer = await plain.post("/select?answer=headers", {"model_name": "zz", "token_ids": [1]})
    assert (answer.status_code, answer.json()["code"]) == (503, "no_endpoints")


async def test_workers_and_loads_may_be_asked_of_a_scope(plain):
    body = {"worker_id": 2, "block_size": 4, "endpoint": "http://w2", "model_name": "b"}
    await plain.post("/workers", body)
    for path in ("/workers", "/loads"):
        for query, models in (
            ("model_name=b", {"b"}),
            ("routing_group=x", set()),
            ("", {"b", "default"}),
        ):
            said = (await plain.client.get(f"{path}?{query}")).json()
            assert {each["model_name"] for each in said} == models


async def test_manual_peer_registration_is_refused(plain):
    assert (await plain.client.get("/replica_sync/peers")).json() == []
    for verb in ("register_peer", "deregister_peer"):
        answer = await plain.post(f"/replica_sync/{verb}", {"endpoint": "tcp://127.0.0.1:5555"})
        assert (answer.status_code, answer.json()["code"]) == (409, "no_replica_peers")


async def test_scope_without_workers_is_503(plain):
    for path in ("/overlap_scores", "/potential_loads", "/select"):
        answer = await plain.post(path, {"token_ids": [1], "model_name": "zz"})
        assert (answer.status_code, answer.json()["code"]) == (503, "no_endpoints")


async def test_many_at_once_reserve_a_selection_once(plain):
    await plain.post("/select", {"token_ids": PROMPT, "selection_id": "s"})
    asked = (plain.post("/reservations", {"selection_id": "s"}) for _ in range(8))
    statuses = sorted([each.status_code for each in await asyncio.gather(*asked)])
    assert statuses == [201] + [404] * 7
