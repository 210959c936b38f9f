"""Fields of overrides that have no effect are named in every answer, and counted."""

import json

import pytest

from support.fleets.direct import DirectRouter

PROMPT = list(range(10))
BODY = {"token_ids": PROMPT}
SCALE = {"router_config_override": {"prefill_load_scale": 4, "router_temperature": 0.5}}
SENTENCE = (
    "router_config_override.prefill_load_scale = 4 has no effect: the policy `predictive` does not "
    "use it; `dynamo-1.0` and `dynamo-1.6` do"
)


@pytest.fixture
async def router():
    async with DirectRouter(use_kv_events=False, policy="predictive").running() as router:
        body = {"worker_id": 1, "endpoint": "http://w1:80", "block_size": 4}
        assert (await router.post("/workers", body)).status_code == 201
        yield router


async def counted(router, field):
    return await router.metric(f'kv_router_ignored_overrides_total{{field="{field}"}}')


async def test_selections_name_what_their_policy_does_not_use(router):
    for path in ("/select", "/select_and_reserve"):
        assert (await router.post(path, {**BODY, **SCALE})).json()["warnings"] == [SENTENCE]
        assert "warnings" not in (await router.post(path, BODY)).json()
        used = {"policy": "dynamo-1.6", "prefill_load_scale": 4}
        answer = await router.post(path, {**BODY, "router_config_override": used})
        assert "warnings" not in answer.json()
    assert await counted(router, "prefill_load_scale") == 2
    assert await counted(router, "router_temperature") is None


async def test_unknown_fields_are_named_after_them(router):
    answer = await router.post("/select", {**BODY, **SCALE, "foo": 1})
    assert answer.json()["warnings"] == [SENTENCE, "field 'foo' is unknown, and ignored"]
    plain = (await router.post("/select", {**BODY, "foo": 1})).json()
    assert plain["warnings"] == ["field 'foo' is unknown, and ignored"]


async def test_items_of_a_batch_have_their_own(router):
    requests = [{**BODY, **SCALE}, BODY]
    first, second = (await router.post("/select:batch", {"requests": requests})).json()["results"]
    assert first["decision"]["warnings"] == [SENTENCE]
    assert "warnings" not in second["decision"]


async def test_answers_as_headers_have_them_in_a_header(router):
    answer = await router.post("/select?answer=headers", {**BODY, **SCALE, "foo": "é"})
    assert answer.content == b""
    named = json.loads(answer.headers["x-kv-router-warnings"])
    assert named == [SENTENCE, "field 'foo' is unknown, and ignored"]
    answer = await router.post("/select?answer=headers", BODY)
    assert "x-kv-router-warnings" not in answer.headers


async def test_forecast_of_loads_honours_what_counts_as_load_and_names_the_rest(router):
    answer = await router.post("/potential_loads", BODY)
    assert answer.json()[0]["potential_prefill_tokens"] == 10
    assert "x-kv-router-warnings" not in answer.headers
    override = {"track_prefill_tokens": False, "router_temperature": 1, "policy": "random"}
    body = {**BODY, "router_config_override": override, "foo": 1}
    answer = await router.post("/potential_loads", body)
    assert answer.json()[0]["potential_prefill_tokens"] == 0
    why = "loads depend on no policy; only track_prefill_tokens and assume_kv_reuse count"
    assert json.loads(answer.headers["x-kv-router-warnings"]) == [
        f"router_config_override.router_temperature = 1 has no effect: {why}",
        f"router_config_override.policy = random has no effect: {why}",
        "field 'foo' is unknown, and ignored",
    ]
    assert await counted(router, "policy") == 1


async def test_forecast_shares_no_prefix_if_it_should_not(router):
    await router.post("/select_and_reserve", {**BODY, "request_id": "a"})
    blocks = []
    for reuse in (True, False):
        body = {**BODY, "router_config_override": {"assume_kv_reuse": reuse}}
        (load,) = (await router.post("/potential_loads", body)).json()
        blocks.append(load["potential_decode_blocks"])
    assert blocks == [4, 6]


async def test_bookings_name_what_no_policy_reads(router):
    chosen = {**BODY, **SCALE, "worker_id": 1, "request_id": "a"}
    first, second = (await router.post("/reservations", chosen)).json()["warnings"]
    assert "prefill_load_scale = 4 has no effect: no policy chooses" in second + first
    plain = {**BODY, "worker_id": 1, "request_id": "b"}
    assert "warnings" not in (await router.post("/reservations", plain)).json()
    selected = {"selection_id": "s", "router_config_override": {"track_prefill_tokens": False}}
    assert "warnings" not in (await router.post("/select", {**BODY, **selected})).json()
    (sentence,) = (await router.post("/reservations", selected)).json()["warnings"]
    assert "track_prefill_tokens = false has no effect: a selection is booked" in sentence


async def test_a_header_never_gets_too_long(router):
    unknown = {f"{'é' * 60}{i}": 1 for i in range(16)}
    answer = await router.post("/potential_loads", {**BODY, **unknown})
    assert answer.status_code == 200
    assert 2_000 < len(answer.headers["x-kv-router-warnings"]) <= 4_096
