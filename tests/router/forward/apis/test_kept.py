"""Responses that engines keep: requests about them go to the engine that has them."""

import pytest

from router.forward.apis.kept_responses import KEPT_S, MOST_RESPONSES, KeptResponses
from router.protocol.requests import RankTarget
from support.engines.agent_engine import AgentEngine
from support.fleets.agent_scenes import agent_scene, body_of
from support.values.token_files import token_lines, token_of

RESPONSES = "/v1/responses"
RANK = RankTarget(1, 0)
ACME, EVIL = map(token_of, ("acme", "evil"))


@pytest.fixture
def scene(nats_server):
    def of(*engines, **fields):
        return agent_scene(nats_server.url, *engines, **fields)

    return of


def not_found(answer, response_id):
    error = {
        "message": f"Response with id '{response_id}' not found.",
        "type": "invalid_request_error",
        "param": "response_id",
        "code": 404,
    }
    return (answer.status_code, answer.json()) == (404, {"error": error})


@pytest.mark.parametrize("stream", [False, True])
async def test_response_stays_with_the_engine_that_has_it(scene, stream):
    engines = [AgentEngine(stores=True) for _ in range(3)]
    async with scene(*engines) as its:
        client = its.forward.client
        for worker_id, engine in its.engines.items():
            answer = await its.forward.post(
                RESPONSES,
                body_of(RESPONSES, stream=stream),
                headers={"x-worker-id": str(worker_id)},
            )
            assert answer.status_code == 200
            (response_id,) = engine.responses
            for _ in range(3):
                more = {"model": "m", "input": "More.", "previous_response_id": response_id}
                answer = await its.forward.post(RESPONSES, more)
                assert (answer.status_code, answer.headers["x-worker-id"]) == (200, str(worker_id))
            got = await client.get(f"{RESPONSES}/{response_id}?include[]=x")
            assert got.json() == engine.responses[response_id]
            assert got.headers["x-worker-id"] == str(worker_id)
            cancelled = await client.post(f"{RESPONSES}/{response_id}/cancel")
            assert cancelled.json()["status"] == "cancelled"
            deleted = await client.delete(f"{RESPONSES}/{response_id}")
            assert deleted.json()["deleted"]
            assert not_found(await client.get(f"{RESPONSES}/{response_id}"), response_id)
        line = "kv_router_forward_kept_responses"
        assert await its.forward.metric(line) == 9  # the three that followed each
        await its.until_free()


async def test_unknown_response_is_not_found_and_no_engine_is_asked(scene):
    engine = AgentEngine(stores=True)
    async with scene(engine) as its:
        more = {"model": "m", "input": "x", "previous_response_id": "resp_1"}
        assert not_found(await its.forward.post(RESPONSES, more), "resp_1")
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
            answer = await its.forward.client.request(method, f"{RESPONSES}/resp_1{path}")
            assert not_found(answer, "resp_1")
        kept = await its.forward.post(RESPONSES, body_of(RESPONSES, store=False))
        answer = await its.forward.client.get(f"{RESPONSES}/{kept.json()['id']}")
        assert answer.status_code == 404
        assert [path for path, _ in engine.asked] == [f"{RESPONSES}/render", RESPONSES]
        for path in (f"{RESPONSES}/x/y", f"{RESPONSES}/"):
            assert (await its.forward.client.get(path)).status_code == 404


async def test_response_of_a_worker_that_is_gone_is_not_found(scene):
    engines = [AgentEngine(stores=True) for _ in range(2)]
    async with scene(*engines) as its:
        answer = await its.forward.post(RESPONSES, body_of(RESPONSES))
        response_id, worker_id = answer.json()["id"], answer.headers["x-worker-id"]
        await its.router.client.delete(f"/workers/{worker_id}")
        more = {"model": "m", "input": "x", "previous_response_id": response_id}
        answer = await its.forward.post(RESPONSES, more)
        assert not_found(answer, response_id), answer.text
        answer = await its.forward.client.get(f"{RESPONSES}/{response_id}")
        assert not_found(answer, response_id)


async def test_tenants_find_their_own_responses_and_images_alone(scene, tmp_path):
    path = tmp_path / "tokens.toml"
    lines = [
        token_lines(name, "route", tenant=name, cache_salts=["*"]) for name in ("acme", "evil")
    ]
    path.write_text("".join([*lines, token_lines("admin", "admin")]))
    engine = AgentEngine(stores=True)
    admin = {"authorization": f"Bearer {token_of('admin')}"}
    async with scene(engine, token_file=str(path), headers=admin) as its:
        acme, evil = ({"x-api-key": token} for token in (ACME, EVIL))
        answer = await its.forward.post(RESPONSES, body_of(RESPONSES), headers=acme)
        assert answer.status_code == 200, answer.text
        at = f"{RESPONSES}/{answer.json()['id']}"
        assert (await its.forward.client.get(at)).status_code == 401
        assert (await its.forward.client.get(at, headers=evil)).status_code == 404
        assert (await its.forward.client.get(at, headers=acme)).status_code == 200
        image = {"type": "image_url", "image_url": {"url": "data:x"}, "uuid": "cat"}
        chat = {"model": "m", "messages": [{"role": "user", "content": [image]}]}
        cached = []
        for headers in (acme, acme, evil):
            answer = await its.forward.post("/v1/chat/completions", chat, headers=headers)
            usage = answer.json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 32, 0]
        names = [
            body["messages"][0]["content"][0]["uuid"]
            for body in engine.bodies("/v1/chat/completions")
        ]
        assert names[0] == names[1] != names[2]
        assert "cat" not in names
        assert all("secret" not in str(body) for _, body in engine.asked)


def test_responses_are_bounded_and_forgotten_after_a_day():
    kept = KeptResponses()
    for number in range(MOST_RESPONSES + 2):
        kept.note("a", f"r{number}", "m", RANK, float(number > 5))
    kept.note("b", "r0", "m", RANK, 0.0)
    assert len(kept) == MOST_RESPONSES + 1
    assert kept.forgotten == 2
    assert kept.find("a", "r1", 1.0) is None
    assert kept.find("a", "r2", 1.0).rank == RANK
    assert kept.find("a", "r2", KEPT_S) is None
    assert kept.find(None, "r2", 1.0) is None
    kept.note("a", "new", "m", RANK, KEPT_S)
    assert len(kept) == MOST_RESPONSES - 4 + 1 + 1
    kept.forget("a", "new")
    kept.forget("c", "new")
    assert kept.find("a", "new", KEPT_S) is None
