"""Aliases and adapters: listed as models, and sent to the workers that serve them."""

from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from router.forward.resilience.model_names import ModelName, ModelNames, names_in
from router.protocol.catalogue import WorkerLabels
from router.protocol.replies import ScopeLoads, ServedName
from router.protocol.requests import SelectRequest
from support.engines.upstreams import Upstream, response, says
from support.fleets.forwarding import Scene
from support.processes.servers import eventually

ANSWERS = says(response(b'{"id": "x", "choices": []}', "200 OK", "content-type: application/json"))
LABELS = {
    1: WorkerLabels(lora_names=["sql"], model_aliases=["big", "b1"], max_model_len=2048),
    2: WorkerLabels(lora_names=[], model_aliases=["big"], max_model_len=1024),
}


@asynccontextmanager
async def two_workers(nats_url):
    async with AsyncExitStack() as stack:
        its = await stack.enter_async_context(Scene.of(nats_url, {}))
        for worker_id, labels in LABELS.items():
            engine = await stack.enter_async_context(Upstream(ANSWERS).running())
            its.engines[worker_id] = engine
            await its.router.worker(worker_id, endpoint=engine.url, labels=labels)
        await eventually(lambda: reaches_both(its))
        yield its


async def reaches_both(its):
    """Whether the endpoint has listed both workers: until then, an alias has one of them."""
    answers = [await its.forward.complete(model="big", prompt=[n, 2, 3]) for n in range(4)]
    return {answer.headers.get("x-worker-id") for answer in answers} == {"1", "2"}


async def test_names_of_a_model_are_listed_like_an_engine_lists_them(nats_server):
    async with two_workers(nats_server.url) as its:
        cards = (await its.forward.client.get("/v1/models")).json()["data"]
        shown = {c["id"]: (c["root"], c["parent"], c["max_model_len"]) for c in cards}
        assert shown == {
            "b1": ("default", None, 1024),
            "big": ("default", None, 1024),
            "default": ("default", None, 1024),
            "sql": ("sql", "default", 1024),
        }
        assert all(card["permission"] == [] and card["object"] == "model" for card in cards)
        (sql,) = [card for card in cards if card["id"] == "sql"]
        assert (await its.forward.client.get("/v1/models/sql")).json() == sql
        assert (await its.forward.client.get("/v1/models/other")).status_code == 404


async def test_requests_go_to_the_workers_that_serve_their_name(nats_server):
    async with two_workers(nats_server.url) as its:
        expected = {"default": {"1", "2"}, "big": {"1", "2"}, "b1": {"1"}, "sql": {"1"}}
        for name, workers in expected.items():
            asked = [
                ("/v1/completions", {"model": name, "prompt": [index, 2, 3], "max_tokens": 1})
                for index in range(6)
            ] + [("/v1/embeddings", {"model": name, "input": "x"})] * 6
            found = set()
            for path, body in asked:
                answer = await its.forward.post(path, body)
                assert answer.status_code == 200, answer.text
                found.add(answer.headers["x-worker-id"])
            assert found == workers, name
        assert {body["model"] for body in its.asked(2)} == {"default", "big"}, "as the client said"
        unknown = await its.forward.complete(model="other")
        assert unknown.json()["error"]["code"] == "model_not_found"
        assert "b1, big, default, sql" in unknown.json()["error"]["message"]
        await its.until_free()


async def test_requests_of_a_split_group_reach_the_workers_of_its_groups(nats_server):
    fields = {"group_splits": "default=blue:1+green:1"}
    async with AsyncExitStack() as stack:
        its = await stack.enter_async_context(Scene.of(nats_server.url, {}, fields))
        for worker_id, group in ((1, "blue"), (2, "green")):
            engine = await stack.enter_async_context(Upstream(ANSWERS).running())
            its.engines[worker_id] = engine
            await its.router.worker(worker_id, endpoint=engine.url, routing_group=group)
        answers = [await its.forward.complete(prompt=[n, 2, 3]) for n in range(20)]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-worker-id"] for answer in answers} == {"1", "2"}
        assert (await its.forward.client.get("/v1/models/default")).status_code == 200
        await its.until_free()


# ── Parts ────────────────────────────────────────────────────────────────────────────────────────


def scope(model, *names, group="default", **fields):
    return ScopeLoads(model, group, [], 0, 0, list(names), **fields)


def test_a_model_comes_before_another_ones_alias():
    alias = ServedName("other", False, [1])
    found = names_in([scope("m", alias), scope("other")], "default")
    assert {each.name: each.model for each in found} == {"m": "m", "other": "other"}
    assert names_in([scope("m", group="another")], "default") == []
    split = scope("m", alias, group="blue", split_from=["default"])
    green = scope("m", ServedName("other", False, [2]), group="green", split_from=["default"])
    assert [each.worker_ids for each in names_in([split, green], "default")] == [(1, 2), None]
    assert names_in([split], "blue") == names_in([split], "default")
    assert names_in([ScopeLoads("m", "default", [])], "default") == [ModelName("m", "m")]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("m", {}),
        ("unknown", {}),
        ("alias", {"model_name": "m", "allowed_worker_ids": [1]}),
        ("sql", {"model_name": "m", "lora_name": "sql"}),
    ],
)
def test_a_request_is_resolved_by_its_name(name, fields):
    served = [ServedName("alias", False, [1]), ServedName("sql", True, [2])]
    names = ModelNames()
    names.replace(names_in([scope("m", *served)], "default"))
    request = SelectRequest(token_ids=[1], model_name=name, session_id="s")
    assert names.resolved(request) == SelectRequest(
        **{"token_ids": [1], "model_name": name, "session_id": "s", **fields}
    )
    assert names.base(name) == fields.get("model_name", name)
