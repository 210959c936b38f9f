"""Engines attached by their URLs, before real servers: by the setting, and by a request."""

import pytest

from router.errors import ConfigError
from support.engines.openai_engine import OpenAiEngine
from support.engines.zmq_engines import stored
from support.fleets.direct import DirectRouter
from support.processes.servers import equals, eventually, free_port

TOKENS = list(range(12))
BOTH_MODELS = [{"id": "m", "owned_by": "vllm"}, {"id": "sql", "owned_by": "vllm", "parent": "m"}]


async def workers(router):
    return (await router.client.get("/workers")).json()


async def only_worker(router):
    (worker,) = await workers(router)
    return worker


async def lifecycle(router):
    return [each["lifecycle"] for each in await workers(router)]


async def test_engine_of_the_setting_is_exact_and_found_by_its_blocks():
    engine = OpenAiEngine()
    async with engine.running(), DirectRouter(workers=engine.url).running() as router:
        await eventually(lambda: equals(lifecycle(router), ["schedulable"]))
        worker = await only_worker(router)
        assert (worker["model_name"], worker["block_size"]) == ("m", 4)
        assert worker["total_kv_blocks"] == 1000
        await eventually(lambda: has_sentence(router, "proved"))
        assert (await only_worker(router))["attachment"] == (
            f"{engine.url}  vLLM 0.32.0, m, 1 rank of 1000 blocks of 4 tokens; events with replay; "
            "proved by a request"
        )
        await router.until_exact(worker["worker_id"])
        engine.engine.publish(stored([11, 22, 33], TOKENS))
        rank = (worker["worker_id"], 0)
        await eventually(lambda: equals(router.overlaps(TOKENS, model_name="m"), {rank: 3}))


async def test_engine_that_is_not_up_yet_is_awaited():
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with DirectRouter(workers=url).running() as router:
        await eventually(lambda: equals(lifecycle(router), ["incomplete"]))
        await eventually(lambda: has_sentence(router, "not up yet"))
        assert (await router.client.get("/ready")).status_code == 503
        async with OpenAiEngine(port=port).running():
            await eventually(lambda: equals(lifecycle(router), ["schedulable"]))
            assert await router.metric('kv_router_attached_engines{state="up"}') == 1
        await eventually(lambda: has_sentence(router, "gone"))
        assert await router.metric('kv_router_attached_engines{state="down"}') == 1


async def has_sentence(router, clause):
    return any(clause in (each["attachment"] or "") for each in await workers(router))


async def test_engine_that_comes_back_with_another_model_serves_that_one():
    port = free_port()
    async with DirectRouter(workers=f"http://127.0.0.1:{port}").running() as router:
        async with OpenAiEngine(port=port).running():
            await eventually(lambda: equals(lifecycle(router), ["schedulable"]))
        async with OpenAiEngine(port=port, models=[{"id": "other", "owned_by": "vllm"}]).running():
            await eventually(lambda: has_sentence(router, "other"), timeout_s=20)
            assert (await only_worker(router))["model_name"] == "other"


async def test_request_with_an_endpoint_alone_attaches_its_engine():
    async with OpenAiEngine().running() as engine, DirectRouter().running() as router:
        answer = await router.post("/workers", {"endpoint": engine.url})
        assert answer.status_code == 201
        worker = answer.json()
        assert worker["model_name"] == "m"
        await eventually(lambda: equals(lifecycle(router), ["schedulable"]))
        path = f"/workers/{worker['worker_id']}"
        assert (await router.client.delete(path)).status_code == 200
        await eventually(lambda: equals(workers(router), []))


async def test_adapters_that_come_later_are_noticed():
    engine = OpenAiEngine()
    async with engine.running(), DirectRouter(workers=engine.url).running() as router:
        await eventually(lambda: equals(lifecycle(router), ["schedulable"]))
        engine.models = BOTH_MODELS
        await eventually(lambda: has_sentence(router, "adapters sql"), timeout_s=20)
        assert (await only_worker(router))["lora_names"] == ["sql"]


async def test_engine_without_events_is_chosen_by_estimates_and_says_so():
    engine = OpenAiEngine(sources={})
    async with engine.running(), DirectRouter(workers=engine.url).running() as router:
        await eventually(lambda: has_sentence(router, "no KV events: restart it with"))
        assert await lifecycle(router) == ["schedulable"]
        (rank,) = (await only_worker(router))["ranks"]
        assert rank["trust"]["state"] == "approximate"
        assert rank["trust"]["reason"].startswith("no event sockets are registered")
        body = {"model_name": "m", "token_ids": TOKENS, "request_id": "r"}
        first = (await router.post("/select_and_reserve", body)).json()
        assert (first["trust"]["state"], first["overlap_blocks"]) == ("approximate", 0)
        again = (await router.post("/select", {"model_name": "m", "token_ids": TOKENS})).json()
        assert again["overlap_blocks"] == 3


async def test_engine_attached_by_request_is_followed_again_after_a_restart(tmp_path):
    fields = {"data_dir": str(tmp_path)}
    async with OpenAiEngine().running() as engine:
        async with DirectRouter(**fields).running() as router:
            assert (await router.post("/workers", {"endpoint": engine.url})).status_code == 201
        async with DirectRouter(**fields).running() as router:
            await eventually(lambda: has_sentence(router, "events with replay"))


async def test_engine_that_the_setting_no_longer_names_is_removed(tmp_path):
    fields = {"data_dir": str(tmp_path)}
    async with OpenAiEngine().running() as engine:
        async with DirectRouter(workers=engine.url, **fields).running() as router:
            await eventually(lambda: equals(lifecycle(router), ["schedulable"]))
        async with DirectRouter(**fields).running() as router:
            await eventually(lambda: equals(workers(router), []))


async def test_key_is_sent_to_engines_of_the_setting_alone(tmp_path):
    path = tmp_path / "key"
    path.write_text("k")
    one, other = OpenAiEngine(key="k"), OpenAiEngine(key="k")
    fields = {"workers": one.url, "worker_token_file": str(path)}
    async with one.running(), other.running(), DirectRouter(**fields).running() as router:
        await eventually(lambda: equals(lifecycle(router), ["schedulable"]))
        answer = await router.post("/workers", {"endpoint": other.url})
        assert "401: needs a key" in answer.json()["attachment"]
        assert (one.given_keys, other.given_keys) == ({"Bearer k"}, {None})


@pytest.mark.parametrize(
    ("body", "status"),
    [({"endpoint": "nonsense"}, 400), ({"endpoint": "http://u:p@a"}, 400), ({}, 422)],
)
async def test_invalid_request_names_the_field(body, status):
    async with DirectRouter().running() as router:
        answer = await router.post("/workers", body)
        assert answer.status_code == status
        assert answer.json()["code"] == "invalid_field"


def test_authorities_that_cannot_be_read_are_refused_by_their_name(tmp_path):
    with pytest.raises(ConfigError, match=r"^worker_ca_file: .*No such file"):
        DirectRouter(worker_ca_file=str(tmp_path / "none.pem"))
