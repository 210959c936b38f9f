"""Index queries over NATS: routers and indexers answer alike."""

import json

import msgspec
import pytest

from router.protocol.values import Tier
from router.runtime.bus.connection import subscribe
from support.processes.running import RunningRouter
from support.values.builders import rank
from support.values.indexing import RunningIndex, announced, local_hashes, sequence_hashes

PROMPT = list(range(40))
SUBJECT = "kv.test.indexer.query"
FOUND = {"Matches": {"scores": [[{"worker_id": 1, "dp_rank": 0}, 10]], "frequencies": []}}
NOTHING = {"Matches": {"scores": [], "frequencies": []}}


@pytest.fixture(params=[RunningRouter, RunningIndex])
async def keeper(request, nats_server, bus, eventually):
    """A process that keeps an index, and the worker 1 that holds the prompt."""
    async with request.param(nats_server.url).running() as keeper, announced(bus, 1) as worker:
        keeper.worker = worker
        await cache(worker, sequence_hashes(PROMPT, 4))
        await eventually(lambda: is_found(bus))
        yield keeper


@pytest.fixture
def ask(keeper, bus):
    async def ask(question):
        return await asked(bus, question)

    return ask


async def asked(bus, question):
    payload = question if isinstance(question, bytes) else msgspec.json.encode(question)
    answer = await bus.client.request(SUBJECT, payload, timeout=60)
    return json.loads(answer.data)


async def is_found(bus):
    try:
        return await asked(bus, {"FindMatchesTokens": {"tokens": PROMPT}}) == FOUND
    except Exception:  # noqa: BLE001 - no subscriber yet
        return False


async def cache(worker, hashes):
    worker.journals[rank(1)].stored(Tier.DEVICE, hashes, None)
    await worker.deliver()


async def test_a_prompt_is_found_by_tokens(ask):
    question = {"tokens": PROMPT, "block_mm_infos": None}
    assert await ask({"FindMatchesTokens": question}) == FOUND
    for seed in ({"lora_name": "a"}, {"cache_salt": "t"}):
        assert await ask({"FindMatchesTokens": {**question, **seed}}) == NOTHING


async def test_a_prompt_is_found_by_hashes(ask):
    """Signed or unsigned."""
    unsigned = local_hashes(PROMPT, 4)
    signed = [h - 2**64 if h >= 2**63 else h for h in unsigned]
    assert max(unsigned) >= 2**63
    for hashes in (unsigned, signed):
        assert await ask({"FindMatchesHashed": {"block_hashes": hashes}}) == FOUND


@pytest.mark.parametrize("question", ["DumpTree", {"DumpTree": None}, {"DumpTree": {}}])
async def test_the_tree_is_what_is_held(ask, keeper, question):
    (event,) = (await ask(question))["TreeDump"]
    assert (event["worker_id"], event["event"]["dp_rank"]) == (1, 0)
    blocks = event["event"]["data"]["stored"]["blocks"]
    assert {block["block_hash"] for block in blocks} == set(sequence_hashes(PROMPT, 4))
    over_http = (await keeper.client.get("/dump")).json()
    assert over_http["default:default"]["events"] == [event]


@pytest.mark.parametrize(
    "question",
    [
        {"FindMatchesTokens": {"tokens": PROMPT, "model_name": "zz"}},
        {"FindMatchesHashed": {"block_hashes": [1], "model_name": "zz"}},
        {"DumpTree": {"model_name": "zz"}},
    ],
)
async def test_another_scope_is_not_indexed(ask, question):
    expected = {"Error": "no indexer for model=zz routing_group=default"}
    assert await ask(question) == expected


@pytest.mark.parametrize("blocks", [17_000, 100_000])
async def test_a_tree_too_large_for_the_bus_says_where_to_ask(ask, keeper, eventually, blocks):
    await cache(keeper.worker, range(2**60, 2**60 + blocks))

    async def refusal():
        return (await ask("DumpTree")).get("Error")

    said = await eventually(refusal)
    assert "GET /dump" in said
    assert "1048576 bytes" in said
    assert await ask({"FindMatchesTokens": {"tokens": PROMPT}}) == FOUND


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (b"", "body"),
        (b"garbage", "body"),
        (b"\xff" * 50, "body"),
        (7, "body"),
        ({}, "body: got 0 of them (allowed: one of `FindMatchesTokens`, `FindMatchesHashed`"),
        ({"Fly": {}}, "body: got 0 of them"),
        ("FindMatchesTokens", "body: got 'FindMatchesTokens' (allowed: one of `FindMatchesTokens`"),
        ("x" * 1_000_000, "body: got 'xxx"),
        ({"DumpTree": None, "FindMatchesTokens": {"tokens": []}}, "body: got 2 of them"),
        ({"FindMatchesTokens": {}}, "FindMatchesTokens.tokens: missing"),
        ({"FindMatchesTokens": {"tokens": [-1]}}, "FindMatchesTokens.tokens[0]"),
        ({"FindMatchesTokens": None}, "FindMatchesTokens"),
        ({"FindMatchesHashed": {"block_hashes": [2**64]}}, "FindMatchesHashed"),
        ({"FindMatchesHashed": {"block_hashes": [-(2**63) - 1]}}, "FindMatchesHashed.block_hashes"),
        (
            {"FindMatchesHashed": {"block_hashes": [1], "cache_salt": "s"}},
            "cache_salt is not accepted by FindMatchesHashed",
        ),
        ({"DumpTree": {"routing_group": "a", "tenant_id": "b"}}, "DumpTree"),
    ],
)
async def test_invalid_fields_are_named(ask, question, said):
    answer = await ask(question)
    assert list(answer) == ["Error"]
    assert answer["Error"].startswith(said)


async def test_index_queries_are_counted(ask, keeper):
    await ask("DumpTree")
    await ask(b"garbage")
    line = 'kv_router_requests_total{code="%s",interface="nats",route="%s"}'
    assert await keeper.metric(line % ("ok", "DumpTree")) == 1
    assert await keeper.metric(line % ("malformed_body", "unknown")) == 1


async def test_one_of_several_answers(ask, keeper, nats_server, bus, eventually):
    async with RunningIndex(nats_server.url, name="second").running() as second:
        await eventually(second.is_ready)
        inbox = bus.client.new_inbox()
        answers = await subscribe(bus, inbox)
        for _ in range(20):
            await bus.client.publish(SUBJECT, b'"DumpTree"', reply=inbox)
        for _ in range(20):
            await answers.next_msg(timeout=60)
        with pytest.raises(TimeoutError):
            await answers.next_msg(timeout=0.2)
