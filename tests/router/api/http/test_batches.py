"""Many in one call: each is answered as it would be alone."""

import pytest

from router.protocol.batches import MAX_SELECTIONS, MAX_STEPS
from support.fleets.direct import DirectRouter
from support.processes.servers import eventually

PROMPT = list(range(10))


@pytest.fixture
async def router():
    async with DirectRouter(use_kv_events=False).running() as router:
        body = {"worker_id": 1, "endpoint": "http://w1", "block_size": 4}
        assert (await router.post("/workers", body)).status_code == 201
        yield router


async def results(router, path, **body):
    answer = await router.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()["results"]


async def test_selections_are_those_of_single_calls(router):
    requests = [
        {"token_ids": PROMPT},
        {"token_ids": [-1]},
        {"token_ids": PROMPT, "selection_id": "s"},
        "nonsense",
        {"token_ids": PROMPT, "model_name": "zz"},
        {},
    ]
    said = await results(router, "/select:batch", requests=requests)
    assert [each["status"] for each in said] == [200, 422, 200, 422, 503, 400]
    for request, each in zip(requests, said, strict=True):
        alone = await router.post("/select", request)
        assert alone.status_code == each["status"]
        assert (each.get("decision") or each["refused"]) == alone.json()
    assert (await router.post("/reservations", {"selection_id": "s"})).status_code == 201


async def test_steps_of_reservations_are_taken_in_order(router):
    for name in ("a", "b"):
        await router.post("/select_and_reserve", {"token_ids": PROMPT, "request_id": name})
    usage = {"prompt_tokens": 10, "cached_tokens": 0}
    steps = [
        {"request_id": "a", "step": "prefill_complete", "usage": usage},
        {"request_id": "zz", "step": "free"},
        {"selection_id": "a", "step": "output_block", "decay_fraction": 0.5},
        {"request_id": "a", "step": "output_block", "decay_fraction": 2},
        {"request_id": "a", "step": "fly"},
        {"step": "free"},
        {"request_id": "b", "step": "free", "usage": usage},
        {"request_id": "b", "step": "free"},
    ]
    said = await results(router, "/reservations:batch", steps=steps)
    assert [each["status"] for each in said] == [200, 404, 200, 400, 422, 400, 200, 404]
    assert said[1]["refused"]["code"] == "reservation_not_found"
    (load,) = (await router.client.get("/loads")).json()[0]["loads"]
    assert (load["active_requests"], load["potential_prefill_tokens"]) == (1, 0)
    assert await router.metric("kv_router_usage_prompt_tokens_total") == 20


async def test_between_batches_progress_is_modelled(router):
    await router.post("/select_and_reserve", {"token_ids": PROMPT, "request_id": "a"})
    await results(
        router, "/reservations:batch", steps=[{"request_id": "a", "step": "prefill_complete"}]
    )

    async def has_grown():
        (load,) = (await router.post("/potential_loads", {"token_ids": [1]})).json()
        return load["potential_decode_blocks"] > 5

    await eventually(has_grown)


async def test_reported_progress_replaces_expected_growth(router):
    body = {"worker_id": 2, "endpoint": "http://w2", "block_size": 4}
    assert (await router.post("/workers", body)).status_code == 201
    for worker_id, at_once in ((1, True), (2, False)):
        name, place = str(worker_id), {"worker_id": worker_id, "token_ids": PROMPT}
        assert (await router.post("/reservations", {**place, "request_id": name})).is_success
        steps = [{"request_id": name, "step": "prefill_complete"}]
        await results(router, "/reservations:batch", steps=steps, at_once=at_once)

    async def blocks():
        loads = (await router.post("/potential_loads", {"token_ids": [1]})).json()
        return {load["worker_id"]: load["potential_decode_blocks"] for load in loads}

    async def has_grown():
        return (await blocks())[2] > 5

    before = (await blocks())[1]
    await eventually(has_grown)
    assert (await blocks())[1] == before


@pytest.mark.parametrize(
    ("path", "field", "most"),
    [("/select:batch", "requests", MAX_SELECTIONS), ("/reservations:batch", "steps", MAX_STEPS)],
)
async def test_batches_are_bounded(router, path, field, most):
    assert len(await results(router, path, **{field: [{}] * most})) == most
    answer = await router.post(path, {field: [{}] * (most + 1)})
    assert (answer.status_code, answer.json()["field"]) == (422, field)
    assert await results(router, path, **{field: []}) == []
