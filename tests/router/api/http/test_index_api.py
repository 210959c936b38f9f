"""The index alone, over a real socket and a real bus: as recorded of its peer, and on its own."""

import json
from pathlib import Path

import msgspec
import pytest

from router.api.http.index_api import INDEX_ROUTES
from router.protocol.values import Tier
from support.fleets.direct import DirectEngine
from support.processes.servers import equals
from support.values.indexing import (
    PROMPT,
    Engine,
    RunningIndex,
    local_hashes,
    publishing,
    sequence_hashes,
)

VECTORS = Path(__file__).parents[3] / "vectors" / "standalone_indexer_examples.json"
TOTAL = 'kv_router_requests_total{code="%s",interface="http",route="%s"}'


# ── As recorded ──────────────────────────────────────────────────────────────────────────────────


def recorded(endpoint):
    """The exchanges, with the recorded engine's socket replaced."""
    text = VECTORS.read_text().replace("tcp://127.0.0.1:27999", endpoint)
    if endpoint == "nats":
        text = text.replace('"source": "zmq"', '"source": "nats"')
    return json.loads(text)


async def replayed(index, exchange):
    request = exchange["request"]
    if request is None:
        return await index.client.request(exchange["method"], exchange["path"])
    if "raw" in request:
        headers = {"content-type": "application/json"}
        return await index.client.post(exchange["path"], content=b"{", headers=headers)
    return await index.post(exchange["path"], request)


def agrees(answer, exchange):
    """JSON answers are equal, in any order; of refusals, the sentence, where it was JSON."""
    expected = exchange["response"]
    if exchange["status"] >= 400:
        said = answer.json()
        return bool(said["code"]) and said["error"] == expected.get("error", said["error"])
    if exchange["content_type"] != "application/json":
        return expected["text"] in ("", "(Prometheus exposition)")
    if exchange["path"] == "/workers":
        return by_id(answer.json()) == by_id(expected)
    return answer.json() == expected


def by_id(workers):
    return {worker["instance_id"]: worker for worker in workers}


async def test_every_recorded_exchange_is_answered_alike(index, bus, eventually):
    engines = [Engine(bus, 1), Engine(bus, 2)]
    for engine in engines:
        engine.cache(PROMPT)
    async with publishing(*engines):
        await answer_alike(index, recorded("nats"), eventually)


async def test_engines_read_directly_are_answered_for_alike(eventually):
    with DirectEngine(1, block_size=16) as engine:
        async with RunningIndex("").running() as index:
            await answer_alike(
                index,
                recorded(engine.endpoint(0)),
                eventually,
                once_registered=lambda: engine.cache(PROMPT),
            )


async def answer_alike(index, exchanges, eventually, once_registered=lambda: None):
    for exchange in exchanges:
        if (exchange["path"], exchange["response"]) != ("/workers", []) and (
            exchange["path"] == "/workers"
        ):
            for instance_id in (1, 2):
                await eventually(lambda i=instance_id: is_heard(index, i))
            once_registered()
            for instance_id in (1, 2):
                await eventually(lambda i=instance_id: equals(index.status(i), "active"))
            await eventually(lambda: equals(index.scores(PROMPT), {"1": {"0": 160}}))
        answer = await replayed(index, exchange)
        assert answer.status_code == exchange["status"], exchange["note"]
        if exchange["path"] == "/dump":
            check_dump(answer.json(), exchange["response"])
        else:
            assert agrees(answer, exchange), (exchange["note"], answer.text)


async def is_heard(index, instance_id):
    """By now nothing that its engine says is missed."""
    (listener,) = (await index.instance(instance_id))["listeners"].values()
    return not listener.get("reason", "").startswith("connecting")


def check_dump(said, recorded):
    """The same but for how blocks are named and counted: by sequence hash, in no order."""
    for dump in (said, recorded):
        for scope in dump.values():
            for event in scope["events"]:
                del event["event"]["event_id"]
                stored = event["event"]["data"]["stored"]
                stored["names"] = sorted(stored["blocks"][0])
                stored["hashes"] = {b["block_hash"] for b in stored.pop("blocks")}
    ours = set(sequence_hashes(PROMPT))
    for scope in recorded.values():
        scope["events"][0]["event"]["data"]["stored"]["hashes"] = ours
    assert said == recorded


# ── Queries ──────────────────────────────────────────────────────────────────────────────────────


async def test_tiers_are_cumulative_and_in_tokens(served, bus, eventually):
    engine = Engine(bus, 2, 3)
    hashes = sequence_hashes(PROMPT)
    engine.events.stored(Tier.DEVICE, hashes[:1], None)
    engine.events.stored(Tier.HOST, hashes[1:3], hashes[0])
    engine.events.stored(Tier.DISK, hashes[3:6], hashes[2])
    engine.events.stored(Tier.REMOTE, hashes[6:7], hashes[5])
    await served.register(2, dp_rank=3)
    async with publishing(engine):
        await eventually(lambda: equals(served.status(2), "active"))
    answer = await served.query(PROMPT)
    assert answer["scores"] == {"1": {"0": 160}, "2": {"3": 112}}
    assert answer["instances"]["2"] == {
        "longest_matched": 112, "gpu": 16, "dp": {"3": 16}, "cpu": 48, "disk": 96,
    }  # fmt: skip


async def test_an_instance_is_as_good_as_its_best_rank(served, bus, eventually):
    engine = Engine(bus, 1, 7)
    engine.cache(PROMPT[:32])
    assert (await served.register(1, dp_rank=7)).status_code == 201
    async with publishing(engine):
        await eventually(lambda: equals(served.scores(PROMPT), {"1": {"0": 160, "7": 32}}))
    overlap = (await served.query(PROMPT))["instances"]["1"]
    assert (overlap["longest_matched"], overlap["dp"]) == (160, {"0": 160, "7": 32})


@pytest.mark.parametrize("seed", [{"lora_name": "a"}, {"cache_salt": "t"}])
async def test_lora_and_salt_name_other_blocks(index, bus, eventually, seed):
    engine = Engine(bus, 1)
    engine.cache(PROMPT, **seed)
    await index.register(1)
    async with publishing(engine):
        await eventually(lambda: equals(index.scores(PROMPT, **seed), {"1": {"0": 160}}))
        assert await index.scores(PROMPT) == {}


async def test_hashes_find_what_tokens_find(served):
    """Signed, as the peer's hashes are."""
    signed = [h - 2**64 if h >= 2**63 else h for h in local_hashes(PROMPT)]
    assert min(signed) < 0
    answer = await served.post("/query_by_hash", {"model_name": "m", "block_hashes": signed})
    assert answer.json() == await served.query(PROMPT)
    assert answer.json()["scores"] == {"1": {"0": 160}}


async def test_long_prompts_are_answered_alike(served):
    """Decoded and hashed on another thread."""
    assert await served.scores([*PROMPT, *range(200_000)]) == {"1": {"0": 160}}
    hashes = [*local_hashes(PROMPT), *range(20_000)]
    signed = [h - 2**64 if h >= 2**63 else h for h in hashes]
    answer = await served.post("/query_by_hash", {"model_name": "m", "block_hashes": signed})
    assert answer.json()["scores"] == {"1": {"0": 160}}


async def test_the_group_has_an_older_name(index):
    await index.register(1, tenant_id="g")
    assert (await index.instance(1))["routing_group"] == "g"
    for name in ("routing_group", "tenant_id"):
        assert await index.scores(PROMPT, **{name: "g"}) == {}
    assert (await index.query(PROMPT))["code"] == "no_indexer"
    body = {"instance_id": 1, "model_name": "m", "tenant_id": "other"}
    assert (await index.post("/unregister", body)).status_code == 404
    body["tenant_id"] = "g"
    assert (await index.post("/unregister", body)).status_code == 200
    assert (await index.query(PROMPT, tenant_id="g"))["code"] == "no_indexer"


async def test_uses_are_counted_within_a_window(nats_server, bus, eventually):
    engine = Engine(bus, 1)
    engine.cache(PROMPT[:48])
    async with (
        RunningIndex(nats_server.url, frequency_window_s=60.0).running() as index,
        publishing(engine),
    ):
        await index.register(1)
        await eventually(lambda: equals(index.status(1), "active"))
        seen = [(await index.query(PROMPT))["frequencies"] for _ in range(3)]
    assert seen == [[], [1, 1, 1], [2, 2, 2]]


# ── What goes wrong ──────────────────────────────────────────────────────────────────────────────

GOOD = {
    "/query": {"token_ids": [1], "model_name": "m"},
    "/query_by_hash": {"block_hashes": [1], "model_name": "m"},
    "/register": {"instance_id": 9, "endpoint": "nats", "model_name": "m", "block_size": 16},
    "/unregister": {"instance_id": 9, "model_name": "m"},
    "/register_peer": {"url": "http://a:1"},
    "/deregister_peer": {"url": "http://a:1"},
}
BAD_FIELDS = [
    ("/query", {"token_ids": None}, "token_ids"),
    ("/query", {"token_ids": [-1]}, "token_ids[0]"),
    ("/query", {"token_ids": [2**32]}, "token_ids[0]"),
    ("/query", {"token_ids": [1.5]}, "token_ids[0]"),
    ("/query", {"model_name": ""}, "model_name"),
    ("/query", {"lora_name": 1}, "lora_name"),
    ("/query", {"routing_group": "a", "tenant_id": "b"}, "body"),
    ("/query_by_hash", {"block_hashes": [2**63]}, "block_hashes[0]"),
    ("/query_by_hash", {"block_hashes": [-(2**63) - 1]}, "block_hashes[0]"),
    ("/query_by_hash", {"block_hashes": "x"}, "block_hashes"),
    ("/register", {"instance_id": -1}, "instance_id"),
    ("/register", {"instance_id": 2**64}, "instance_id"),
    ("/register", {"block_size": 0}, "block_size"),
    ("/register", {"dp_rank": 65_536}, "dp_rank"),
    ("/register", {"endpoint": ""}, "endpoint"),
    ("/unregister", {"dp_rank": "0"}, "dp_rank"),
    ("/register_peer", {"url": 7}, "url"),
    ("/deregister_peer", {"url": None}, "url"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "field"), BAD_FIELDS)
async def test_a_bad_field_is_named(index, path, fields, field):
    answer = await index.post(path, {**GOOD[path], **fields})
    said = answer.json()
    assert (answer.status_code, said["code"], said["field"]) == (422, "invalid_field", field)
    assert said["allowed"]


async def test_service_survives_any_body(served):
    headers = {"content-type": "application/json"}
    for path, good in GOOD.items():
        for name in good:
            body = {key: value for key, value in good.items() if key != name}
            answer = await served.post(path, body)
            if name != "model_name" or path.startswith(("/register", "/unregister")):
                assert (answer.status_code, answer.json()["field"]) == (422, name)
        for body, status in (
            (b"{", 400),
            (b"", 400),
            (b"[]", 422),
            (b"\xff" * 9, 400),
            (b"[" * 100_000, 422),
            (b'{"x":' * 100_000, 400),
            (msgspec.msgpack.encode(good), 400),
        ):
            answer = await served.client.post(path, content=body, headers=headers)
            assert answer.status_code == status, (path, body[:9])
            assert answer.json()["code"] in ("malformed_body", "invalid_field")
        answer = await served.client.post(path, content=msgspec.json.encode(good))
        assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")
        answer = await served.client.delete(path)
        assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed")
    assert (await served.client.get("/nope")).json()["code"] == "route_not_found"
    assert await served.scores(PROMPT) == {"1": {"0": 160}}


async def test_a_body_over_the_limit_is_413(served):
    async def endless():
        for _ in range(16):
            yield bytes(1024 * 1024)

    headers = {"content-type": "application/json"}
    for path in GOOD:
        answer = await served.client.post(path, content=endless(), headers=headers)
        assert (answer.status_code, answer.json()["limit_bytes"]) == (413, 8 * 1024 * 1024)
    assert await served.scores(PROMPT) == {"1": {"0": 160}}


async def test_a_caller_that_says_nothing_is_not_waited_for(nats_server):
    async with RunningIndex(nats_server.url, body_timeout_s=0.2).running() as index:
        status, answer = await index.post_a_beginning("/query")
    assert (status, answer["code"]) == (408, "body_timeout")


# ── The process ──────────────────────────────────────────────────────────────────────────────────


async def test_is_ready_once_it_has_caught_up(stopped_nats_server, eventually):
    server = stopped_nats_server
    async with RunningIndex(server.url).running() as index:
        answer = await index.client.get("/ready")
        assert (answer.status_code, answer.json()["ready"]) == (503, False)
        health = await index.client.get("/health")
        assert (health.status_code, health.content) == (200, b"")
        assert "content-type" not in health.headers
        assert (await index.register(1)).status_code == 201
        server.start()
        await eventually(index.is_ready)
        assert await index.instance(1)


async def test_openapi_describes_every_route(index):
    schema = (await index.client.get("/openapi.json")).json()
    for route in INDEX_ROUTES:
        described = schema["paths"][route.path][route.method.lower()]
        assert described["summary"] == route.summary
        assert set(described["responses"]) >= {str(route.status), *map(str, route.refusals)}


async def test_metrics_count_what_happens(served):
    before = await served.metric(TOTAL % (200, "/query"))
    await served.query(PROMPT)
    await served.query(PROMPT, model_name="zz")
    assert await served.metric(TOTAL % (200, "/query")) == before + 1
    assert await served.metric(TOTAL % (404, "/query")) == 1
    held = 'kv_router_index_blocks{model_name="m",routing_group="default"}'
    assert await served.metric(held) == 10
