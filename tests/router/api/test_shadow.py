"""A router in shadow mode, over HTTP."""

import pytest

from router.errors import ConfigError
from router.runtime.process.loading import Loaded
from router.runtime.process.settings import with_settings
from support.processes.running import RunningRouter

PROMPT = list(range(40))


@pytest.fixture
async def shadow(nats_server):
    async with RunningRouter(nats_server.url, shadow=True).running() as router:
        for worker_id in (1, 2):
            await router.worker(worker_id)
        yield router


async def loads(router):
    (scope,) = (await router.client.get("/loads")).json()
    return {load["worker_id"]: load["active_requests"] for load in scope["loads"]}


async def test_shadow_router_answers_without_booking(shadow):
    answer = await shadow.post("/select_and_reserve", {"token_ids": PROMPT, "request_id": "a"})
    assert answer.status_code == 200
    assert answer.json()["worker_id"] in (1, 2)
    assert await loads(shadow) == {1: 0, 2: 0}
    assert (await shadow.client.delete("/reservations/a")).status_code == 404


@pytest.mark.parametrize("path", ["/select", "/select_and_reserve"])
async def test_the_incumbents_choice_is_compared(shadow, path):
    for request_id in ("a", "b"):
        body = {"token_ids": PROMPT, "request_id": request_id, "incumbent": {"worker_id": 2}}
        assert (await shadow.post(path, body)).status_code == 200
    report = (await shadow.client.get("/shadow")).json()
    (scope,) = report["scopes"]
    assert scope["compared"] == 2
    assert scope["agreed"] + scope["tied"] + len(report["differences"]) >= 2
    assert report["books"].startswith("only what the incumbent chose")
    labels = 'model_name="default",outcome="agreed",routing_group="default"'
    agreed = await shadow.metric(f"kv_router_shadow_requests_total{{{labels}}}")
    assert agreed == scope["agreed"]


async def test_the_incumbents_choice_is_booked_and_lives_as_any_other(shadow):
    body = {"token_ids": PROMPT, "request_id": "a", "incumbent": {"worker_id": 2, "dp_rank": 0}}
    await shadow.post("/select_and_reserve", body)
    assert await loads(shadow) == {1: 0, 2: 1}
    assert (await shadow.post("/select_and_reserve", body)).status_code == 200
    assert (await shadow.client.post("/reservations/a/prefill_complete")).status_code == 200
    assert (await shadow.client.delete("/reservations/a")).status_code == 200
    assert await loads(shadow) == {1: 0, 2: 0}


async def test_unknown_incumbent_is_counted_and_ignored(shadow):
    body = {"token_ids": PROMPT, "request_id": "a", "incumbent": {"worker_id": 99}}
    assert (await shadow.post("/select_and_reserve", body)).status_code == 200
    (scope,) = (await shadow.client.get("/shadow")).json()["scopes"]
    assert (scope["compared"], scope["unknown_ranks"]) == (0, 1)


@pytest.mark.parametrize("incumbent", [{}, {"worker_id": -1}, {"worker_id": 1, "dp_rank": 70000}])
async def test_an_incumbent_that_is_none_is_refused(shadow, incumbent):
    answer = await shadow.post("/select", {"token_ids": PROMPT, "incumbent": incumbent})
    assert answer.status_code in (400, 422)
    assert "incumbent" in answer.json()["field"]


async def test_a_router_that_decides_has_nothing_to_compare(nats_server):
    async with RunningRouter(nats_server.url).running() as router:
        await router.worker(1)
        body = {"token_ids": PROMPT, "request_id": "a", "incumbent": {"worker_id": 1}}
        assert (await router.post("/select_and_reserve", body)).status_code == 200
        assert await loads(router) == {1: 1}
        answer = await router.client.get("/shadow")
        assert (answer.status_code, answer.json()["code"]) == (409, "shadow_off")


@pytest.fixture
async def canary(nats_server):
    """A router whose policy ignores caches, beside which another one chooses."""
    running = RunningRouter(nats_server.url, policy="least-loaded", shadow_policy="dynamo-1.6")
    async with running.running() as router:
        for worker_id in (1, 2):
            await router.worker(worker_id)
        yield router


async def test_second_policy_is_compared_and_only_the_first_books(canary):
    for request_id in ("a", "b", "c"):
        body = {"token_ids": PROMPT, "request_id": request_id}
        assert (await canary.post("/select_and_reserve", body)).status_code == 200
    assert sum((await loads(canary)).values()) == 3
    report = (await canary.client.get("/shadow")).json()
    (scope,) = report["scopes"]
    assert (scope["compared"], scope["unknown_ranks"]) == (3, 0)
    assert report["books"].endswith("only compared: dynamo-1.6")
    for difference in report["differences"]:
        assert (difference["source"], difference["policy"]) == ("policy", "dynamo-1.6")
    assert await canary.metric(
        'kv_router_shadow_isl_tokens_total{model_name="default",routing_group="default"}'
    ) == 3 * len(PROMPT)


async def test_requests_that_name_a_policy_or_a_rank_are_not_compared(canary):
    named = {"router_config_override": {"policy": "round-robin"}}
    pinned = {"pinned_worker": {"worker_id": 1, "dp_rank": 0}}
    for fields in (named, pinned):
        answer = await canary.post("/select", {"token_ids": PROMPT, **fields})
        assert answer.status_code == 200, answer.text
    assert (await canary.client.get("/shadow")).json()["scopes"] == []


async def test_unknown_second_policy_is_refused_at_start(nats_server):
    with pytest.raises(ConfigError, match="shadow_policy"):
        async with RunningRouter(nats_server.url, shadow_policy="best").running():
            pass


async def test_second_policy_is_changed_begun_and_ended_by_a_reload(canary):
    def reload(policy):
        changed = with_settings(canary.config, {"shadow_policy": policy})
        canary.service.reconfigure(Loaded(changed, {}))

    async def compared():
        assert (await canary.post("/select", {"token_ids": PROMPT})).status_code == 200
        report = (await canary.client.get("/shadow")).json()
        return report["scopes"][0]["compared"], report["books"].rpartition(" ")[2]

    assert [await compared() for _ in range(2)][-1] == (2, "dynamo-1.6")
    reload("round-robin")
    assert await compared() == (1, "round-robin")
    with pytest.raises(ConfigError, match="shadow_policy"):
        reload("best")
    assert await compared() == (2, "round-robin")
    reload("")
    assert (await canary.client.get("/shadow")).status_code == 409
    reload("random")
    assert await compared() == (1, "random")
