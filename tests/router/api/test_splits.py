"""Requests of a split group over HTTP: where they go, and what is said about it."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from router.errors import ConfigError
from router.runtime.process.loading import Loaded
from router.runtime.process.settings import with_settings
from support.engines.upstreams import Upstream
from support.fleets.direct import DirectRouter
from support.processes.servers import equals, eventually

WAITING = "kv_router_waiting_requests"
WAITING += '{model_name="default",policy_class="default",routing_group="green"}'
GROUPS = {1: "blue", 2: "blue", 3: "green"}


@pytest.fixture
async def stack():
    async with AsyncExitStack() as stack:
        yield stack


async def started(stack, splits="default=blue:50+green:50", groups=GROUPS, **fields):
    settings = {"use_kv_events": False, "group_splits": splits, **fields}
    router = await stack.enter_async_context(DirectRouter(**settings).running())
    for worker_id, group in groups.items():
        await add(router, worker_id, group)
    return router


async def add(router, worker_id, group, endpoint="http://w"):
    body = {"worker_id": worker_id, "endpoint": endpoint, "block_size": 4}
    body |= {"max_num_batched_tokens": 1000, "routing_group": group}
    assert (await router.post("/workers", body)).json()["lifecycle"] == "schedulable"


async def place(router, number, path="/select", **fields):
    prompt = {} if "text" in fields else {"token_ids": [number] * 40}
    answer = await router.post(path, {**prompt, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_requests_go_to_the_groups_by_their_weights_and_stay_there(stack):
    router = await started(stack)
    first = [await place(router, number) for number in range(40)]
    again = [await place(router, number) for number in range(40)]
    groups = [each["routing_group"] for each in first]
    assert 5 < groups.count("green") < 35
    assert [each["routing_group"] for each in again] == groups
    assert all(GROUPS[each["worker_id"]] == each["routing_group"] for each in first)
    green = groups.index("green")
    assert first[green]["split"] == {
        "asked_group": "default", "routing_group": "green", "by": "prompt", "share": 0.5,
    }  # fmt: skip
    labels = 'asked_group="default",routing_group="green"'
    counted = await router.metric(f"kv_router_split_requests_total{{{labels}}}")
    assert counted == 2 * groups.count("green")


async def test_a_session_stays_in_its_group_whatever_it_says(stack):
    router = await started(stack)
    for name in ("a", "b", "c", "d"):
        places = [await place(router, number, session_id=name) for number in range(8)]
        assert len({each["routing_group"] for each in places}) == 1
        assert {each["split"]["by"] for each in places} == {"session"}


async def test_a_group_without_workers_gets_nothing_and_is_named(stack):
    router = await started(stack, groups={1: "blue"})
    places = [await place(router, number) for number in range(12)]
    assert {each["routing_group"] for each in places} == {"blue"}
    assert {tuple(each["split"]["skipped"]) for each in places} == {("green",)}
    await add(router, 3, "green")
    places = [await place(router, number) for number in range(24)]
    assert {each["routing_group"] for each in places} == {"blue", "green"}
    excluded = [await place(router, number, excluded_worker_ids=[3]) for number in range(12)]
    assert {each["routing_group"] for each in excluded} == {"blue"}


async def test_a_named_worker_and_a_selection_are_found_in_their_group(stack):
    router = await started(stack)
    for worker_id in GROUPS:
        pinned = await place(router, 1, pinned_worker={"worker_id": worker_id})
        assert (pinned["worker_id"], pinned["split"]["by"]) == (worker_id, "worker")
        name = f"s{worker_id}"
        await place(router, 2, selection_id=name, pinned_worker={"worker_id": worker_id})
        booked = await router.post("/reservations", {"selection_id": name})
        assert booked.json()["worker_id"] == worker_id
        body = {"token_ids": [3] * 40, "worker_id": worker_id, "request_id": f"r{worker_id}"}
        assert (await router.post("/reservations", body)).json()["worker_id"] == worker_id
        for booking in (name, f"r{worker_id}"):
            answer = await router.client.delete(f"/reservations/{booking}")
            assert answer.status_code == 200


async def test_a_waiting_request_says_how_its_group_was_chosen(stack):
    router = await started(stack, "default=green:1", router_queue_threshold=0.001)
    busy = {"request_id": "x", "worker_id": 3, "token_ids": [2] * 40, "routing_group": "green"}
    assert (await router.post("/reservations", busy)).status_code == 201
    booking = asyncio.create_task(place(router, 1, "/select_and_reserve", request_id="a"))
    await eventually(lambda: equals(router.metric(WAITING), 1.0))
    await router.client.delete("/reservations/x")
    booked = await booking
    assert (booked["worker_id"], booked["split"]["routing_group"]) == (3, "green")
    assert booked["waited_s"] > 0


async def test_groups_of_a_split_are_named_with_the_loads(stack):
    router = await started(stack, "default=blue:1+green:1,default@m=m:1")
    scopes = (await router.client.get("/loads")).json()
    assert {each["routing_group"]: each["split_from"] for each in scopes} == {
        "blue": ["default"], "green": ["default"],
    }  # fmt: skip


async def test_other_weights_apply_to_the_next_request(stack):
    router = await started(stack, "default=blue:1+green:0")
    assert {(await place(router, n))["routing_group"] for n in range(12)} == {"blue"}
    changed = with_settings(router.config, {"group_splits": "default=blue:0+green:1"})
    router.service.reconfigure(Loaded(changed, {}))
    assert {(await place(router, n))["routing_group"] for n in range(12)} == {"green"}
    with pytest.raises(ConfigError, match="group_splits"):
        router.service.reconfigure(Loaded(with_settings(changed, {"group_splits": "x"}), {}))
    assert {(await place(router, n))["routing_group"] for n in range(12)} == {"green"}


async def test_a_preview_says_which_group_a_prompt_would_go_to_and_why(stack):
    async def tokenize(_, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\n" + b'{"tokens":[1,2,3,4]}')
        await writer.drain()

    engine = await stack.enter_async_context(Upstream(tokenize).running())
    router = await started(stack, "default=blue:1+green:3+red:1", groups={})
    for worker_id, group in GROUPS.items():
        await add(router, worker_id, group, endpoint=engine.url)
    chosen = (await place(router, 7, session_id="a"))["split"]
    assert chosen["skipped"] == ["red"]
    for body in ({"token_ids": [7] * 40}, {"text": "7"}):
        looked = (await place(router, 7, "/dashboard/look", session_id="a", **body))["decision"]
        assert looked["split"] == chosen
        assert GROUPS[looked["worker_id"]] == looked["routing_group"] == chosen["routing_group"]
    prompt = (await place(router, 7))["split"]
    scores = await place(router, 7, "/overlap_scores")
    assert scores["split"] == prompt
    assert {GROUPS[each["worker_id"]] for each in scores["workers"]} == {prompt["routing_group"]}
    whole = await place(router, 7, "/overlap_scores", routing_group="blue")
    assert "split" not in whole
    assert await counted(router) == 2


async def counted(router):
    labels = 'asked_group="default",routing_group="{}"'
    name = "kv_router_split_requests_total"
    groups = set(GROUPS.values())
    return sum([await router.metric(f"{name}{{{labels.format(each)}}}") for each in groups])
