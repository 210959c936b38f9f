"""HTTP, over a real socket: every route, and every way to get it wrong."""

import asyncio
import json

import msgspec
import pytest

from router.api.http.routes import ROUTES
from router.protocol.values import Tier
from router.sequence.hashing.block_hashes import chain, hash_seed, local_block_hashes, token_array
from support.fleets.direct import DirectRouter
from support.processes.running import RunningRouter
from support.processes.servers import equals
from support.values.builders import rank

PROMPT = list(range(40))


def hashes(tokens, **seed):
    local = local_block_hashes(token_array(tokens), 4, seed=hash_seed(**seed))
    return chain(local).tolist()


@pytest.fixture
async def fleet(router, eventually):
    """Three workers; the second holds the prompt's first 20 tokens, the third, salted, all."""
    workers = await router.workers(1, 2, 3)
    workers[1].journals[rank(2)].stored(Tier.DEVICE, hashes(PROMPT[:20]), None)
    workers[2].journals[rank(3)].stored(Tier.DEVICE, hashes(PROMPT, cache_salt="t"), None)
    for worker in workers:
        await worker.deliver()
    await eventually(lambda: equals(held_blocks(router), [0, 5, 10]))
    return router


async def held_blocks(router):
    workers = (await router.client.get("/workers")).json()
    return [rank["held_blocks"] for worker in workers for rank in worker["ranks"]]


async def select(router, **fields):
    answer = await router.post("/select", {"token_ids": PROMPT, **fields})
    return answer.status_code, answer.json()


async def test_selects_by_cached_prefix(fleet):
    status, body = await select(fleet)
    assert status == 200
    assert (body["worker_id"], body["dp_rank"], body["endpoint"]) == (2, 0, "http://w2")
    assert (body["overlap"]["longest_matched"], body["predicted_cached_blocks"]) == (20, 5)
    assert (body["effective_prefill_tokens"], body["potential_decode_blocks"]) == (20, 10)
    assert body["trust"]["state"] == "exact"


async def test_selects_by_hashes_where_a_caller_knows_no_tokens(fleet):
    known = {"sequence_hashes": hashes(PROMPT), "isl_tokens": len(PROMPT)}
    _, by_tokens = await select(fleet)
    _, by_hashes = await select(fleet, token_ids=None, **known)
    assert {**by_hashes, "trust": None} == {**by_tokens, "trust": None}
    salted = {"sequence_hashes": hashes(PROMPT, cache_salt="t"), "isl_tokens": len(PROMPT)}
    assert (await select(fleet, token_ids=None, **salted))[1]["worker_id"] == 3
    status, body = await select(fleet, token_ids=None, sequence_hashes=[1])
    assert (status, body["field"]) == (400, "isl_tokens")


async def test_takes_salt_lora_and_multimodal_infos_wherever_tokens_are(fleet):
    assert (await select(fleet, cache_salt="t"))[1]["worker_id"] == 3
    infos = [{"mm_objects": [{"mm_hash": 7, "offsets": [[0, 2]]}]}]
    for fields in ({"lora_name": "a"}, {"block_mm_infos": infos}):
        assert (await select(fleet, **fields))[1]["overlap_blocks"] == 0
        for path in ("/potential_loads", "/overlap_scores"):
            answer = await fleet.post(path, {"token_ids": PROMPT, **fields})
            assert answer.status_code == 200


async def test_explains_on_request(fleet):
    _, body = await select(fleet, explain=True)
    costs = {c["worker_id"]: c["cost"] for c in body["candidates"]}
    assert costs == {1: 20.0, 2: 15.0, 3: 20.0}


async def test_the_life_of_a_reservation(fleet):
    answer = await fleet.post("/select_and_reserve", {"token_ids": PROMPT, "request_id": "r1"})
    assert (answer.status_code, answer.json()["request_id"]) == (200, "r1")
    for path, body in (
        ("/reservations/r1/prefill_complete", None),
        ("/reservations/r1/output_block", {"decay_fraction": 0.5}),
    ):
        answer = await fleet.post(path, body)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    loads = (await fleet.client.get("/loads")).json()[0]["loads"]
    assert [load["active_requests"] for load in loads] == [0, 1, 0]
    assert (await fleet.client.delete("/reservations/r1")).status_code == 200
    assert (await fleet.client.delete("/reservations/r1")).status_code == 404


async def test_what_engines_had_cached_is_held_against_what_was_predicted(fleet):
    for name, cached_tokens in (("a", 16), ("b", 30)):
        await fleet.post("/select_and_reserve", {"token_ids": PROMPT, "request_id": name})
        usage = {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": cached_tokens}}
        for _ in range(2):  # the second time it is known
            done = await fleet.post(f"/reservations/{name}/prefill_complete", {"usage": usage})
            assert done.status_code == 200
    assert await usage_counted(fleet) == [80, 46, 40, 4 + 10]


async def usage_counted(fleet):
    names = ("prompt", "cached", "predicted_cached", "mispredicted")
    return [await fleet.metric(f"kv_router_usage_{name}_tokens_total") for name in names]


async def test_a_wrong_chat_template_is_named(fleet):
    assert "mispredicted" not in (await fleet.client.get("/ready?verbose")).json()
    for request in range(6):
        body = {"token_ids": PROMPT, "request_id": f"r{request}", "tenant": "acme"}
        await fleet.post("/select_and_reserve", body)
        usage = {"usage": {"prompt_tokens": 41}}
        ended = await fleet.client.request("DELETE", f"/reservations/r{request}", json=usage)
        assert ended.status_code == 200
    answer = await fleet.client.get("/ready?verbose")
    ready = answer.json()
    assert (answer.status_code, ready["ready"]) == (200, True)
    assert "likely chat_template: engines count +1 tokens in 6 of 6" in ready["degraded"]
    assert ready["mispredicted"][0]["causes"][0]["name"] == "chat_template"
    assert "acme" not in answer.text
    predictions = (await fleet.client.get("/predictions")).json()
    assert {each["tenant"] for each in predictions["findings"]} == {None, "acme"}
    everybody = predictions["groups"][0]
    assert (everybody["requests"], everybody["compared"]) == (6, 0)  # no usage says what was cached
    labels = 'cause="chat_template",model_name="default",routing_group="default",worker_id=""'
    assert await fleet.metric(f"kv_router_mispredicted{{{labels}}}") == 2


async def test_streams_say_their_usage_last(fleet):
    for name, untracked in (("a", False), ("b", True)):
        body = {"token_ids": PROMPT, "request_id": name}
        override = {"router_config_override": {"track_prefill_tokens": False}} if untracked else {}
        await fleet.post("/select_and_reserve", body | override)
        await fleet.post(f"/reservations/{name}/prefill_complete", None)
        usage = {"prompt_tokens": 40, "cached_tokens": 16}
        ended = await fleet.client.request(
            "DELETE", f"/reservations/{name}", json={"usage": usage | {"cached_tokens": 41}}
        )
        assert (ended.status_code, ended.json()["field"]) == (400, "usage.cached_tokens")
        ended = await fleet.client.request("DELETE", f"/reservations/{name}", json={"usage": usage})
        assert ended.status_code == 200
    assert await usage_counted(fleet) == [40, 16, 20, 4]  # prefills of others are not foreseen


async def test_more_cached_than_there_was_is_refused(fleet):
    await fleet.post("/select_and_reserve", {"token_ids": PROMPT, "request_id": "r"})
    usage = {"prompt_tokens": 40, "cached_tokens": 41}
    answer = await fleet.post("/reservations/r/prefill_complete", {"usage": usage})
    assert (answer.status_code, answer.json()["field"]) == (400, "usage.cached_tokens")


async def test_a_caller_may_choose_the_rank(fleet):
    body = {"token_ids": PROMPT, "request_id": "r1", "worker_id": 3}
    answer = await fleet.post("/reservations", body)
    assert answer.status_code == 201
    assert answer.json() == {
        "selection_id": "r1", "request_id": "r1",
        "model_name": "default", "routing_group": "default",
        "worker_id": 3, "dp_rank": 0, "endpoint": "http://w3",
    }  # fmt: skip


async def test_the_request_id_may_be_in_the_header(fleet):
    header = {"x-request-id": "from-header"}
    answer = await fleet.post("/select_and_reserve", {"token_ids": PROMPT}, headers=header)
    assert answer.json()["request_id"] == "from-header"
    body = {"token_ids": PROMPT, "request_id": "from-body"}
    answer = await fleet.post("/select_and_reserve", body, headers=header)
    assert answer.json()["request_id"] == "from-body"


async def test_an_unfit_header_is_refused(fleet):
    header = {"x-request-id": "h" * 257}
    answer = await fleet.post("/select_and_reserve", {"token_ids": PROMPT}, headers=header)
    assert (answer.status_code, answer.json()["field"]) == (400, "x-request-id")


async def test_potential_loads_and_overlap_scores(fleet):
    loads = (await fleet.post("/potential_loads", {"token_ids": PROMPT})).json()
    assert [load["potential_prefill_tokens"] for load in loads] == [40, 20, 40]
    scores = (await fleet.post("/overlap_scores", {"token_ids": PROMPT})).json()
    assert [worker["device_blocks"] for worker in scores["workers"]] == [0, 5, 0]
    assert scores["num_blocks"] == 10


async def test_dump_is_what_the_workers_hold(fleet):
    events = (await fleet.client.get("/dump")).json()["default:default"]["events"]
    held = {
        event["worker_id"]: {b["block_hash"] for b in event["event"]["data"]["stored"]["blocks"]}
        for event in events
    }
    assert held == {2: set(hashes(PROMPT[:20])), 3: set(hashes(PROMPT, cache_salt="t"))}


async def test_a_rank_can_be_dumped_alone(fleet):
    answer = await fleet.client.get("/dump", params={"worker_id": 2, "dp_rank": 0})
    (event,) = answer.json()["default:default"]["events"]
    assert (event["worker_id"], len(event["event"]["data"]["stored"]["blocks"])) == (2, 5)
    empty = await fleet.client.get("/dump", params={"worker_id": 1, "dp_rank": 0})
    assert empty.json() == {}
    for wrong in (
        {"worker_id": 2},
        {"worker_id": "x", "dp_rank": 0},
        {"dp_rank": -1},
        {"worker_id": "9" * 5000, "dp_rank": 0},
    ):
        answer = await fleet.client.get("/dump", params=wrong)
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_field")


async def test_a_block_names_its_holders(fleet):
    block = (await fleet.client.get(f"/blocks/{hashes(PROMPT)[4]}")).json()
    (holder,) = block["holders"]
    assert (holder["worker_id"], holder["fastest_tier"]) == (2, "device")
    assert (await fleet.client.get("/blocks/5")).json()["holders"] == []
    answer = await fleet.client.get(f"/blocks/{2**64}")
    assert (answer.status_code, answer.json()["field"]) == (400, "sequence_hash")


async def test_cordon_and_drain(fleet):
    async def patch(lifecycle):
        return await fleet.client.patch("/workers/2", json={"lifecycle": lifecycle})

    answer = await patch("cordoned")
    assert (answer.status_code, answer.json()["lifecycle"]) == (200, "cordoned")
    assert (await select(fleet))[1]["worker_id"] != 2
    assert (await patch("draining")).json()["lifecycle"] == "drained"
    assert (await patch("schedulable")).json()["lifecycle"] == "schedulable"
    assert (await select(fleet))[1]["worker_id"] == 2


async def test_health_ready_routers_and_docs(fleet, eventually):
    assert (await fleet.client.get("/health")).json() == {"status": "ok"}
    ready = await fleet.client.get("/ready")
    assert (ready.status_code, ready.json()["schedulable_workers"]) == (200, 3)
    as_form = {"content-type": "application/x-www-form-urlencoded"}
    assert (await fleet.client.get("/ready", headers=as_form)).status_code == 200
    for method in ("HEAD", "POST"):
        assert (await fleet.client.request(method, "/ready")).status_code == 405

    async def routers():
        return [r["name"] for r in (await fleet.client.get("/routers")).json()] == ["r"]

    await eventually(routers)
    assert (await fleet.client.get("/docs")).status_code == 200


async def test_openapi_describes_every_route(fleet):
    schema = (await fleet.client.get("/openapi.json")).json()
    for route in ROUTES:
        described = schema["paths"][route.path.replace(":int", "")][route.method.lower()]
        assert described["summary"] == route.summary
        assert set(described["responses"]) >= {str(route.status), *map(str, route.refusals)}
    text = json.dumps(schema)
    for reference in {part.split('"')[0] for part in text.split('"$ref": "#/')[1:]}:
        place = schema
        for step in reference.split("/"):
            place = place[step]


async def test_metrics_count_what_happens(fleet):
    await select(fleet)
    await fleet.post("/select", {"token_ids": "x"})
    assert await fleet.metric('kv_router_decisions_total{command="select"}') == 1
    assert await fleet.metric("kv_router_prompt_tokens_total") == 40
    assert await fleet.metric("kv_router_predicted_cached_tokens_total") == 20
    refused = 'kv_router_refusals_total{code="invalid_field",interface="http"}'
    assert await fleet.metric(refused) == 1
    assert await fleet.metric("kv_router_workers") == 3
    assert await fleet.metric("kv_router_ready") == 1
    held = 'kv_router_index_blocks{model_name="default",routing_group="default"}'
    assert await fleet.metric(held) == 15
    trust = 'kv_router_worker_trust{dp_rank="0",state="exact",worker_id="2"}'
    assert await fleet.metric(trust) == 1


BAD_BODIES = [
    ({"token_ids": [1, -1]}, 422, "token_ids[1]"),
    ({"token_ids": [4294967296]}, 422, "token_ids[0]"),
    ({"token_ids": [1.5]}, 422, "token_ids[0]"),
    ({"token_ids": ["1"]}, 422, "token_ids[0]"),
    ({"token_ids": "abc"}, 422, "token_ids"),
    ({}, 400, "token_ids"),
    ({"token_ids": None}, 400, "token_ids"),
    ({"token_ids": [1], "model_name": 7}, 422, "model_name"),
    ({"token_ids": [1], "allowed_worker_ids": [-1]}, 422, "allowed_worker_ids[0]"),
    ({"token_ids": [1], "request_id": ""}, 422, "request_id"),
]


@pytest.mark.parametrize("path", ["/select", "/select_and_reserve"])
@pytest.mark.parametrize(("body", "status", "field"), BAD_BODIES)
async def test_a_bad_field_is_named(router, path, body, status, field):
    answer = await router.post(path, {"request_id": "x", **body})
    said = answer.json()
    assert (answer.status_code, said["field"]) == (status, field)
    assert said["code"] == "invalid_field"
    assert said["allowed"]


async def test_a_booking_of_the_callers_choice_needs_an_id(fleet):
    answer = await fleet.post("/reservations", {"token_ids": PROMPT, "worker_id": 1})
    assert (answer.status_code, answer.json()["code"]) == (400, "missing_request_id")


async def test_a_booking_gets_an_id_if_it_has_none(fleet):
    said = (await fleet.post("/select_and_reserve", {"token_ids": PROMPT})).json()
    assert said["selection_id"] == said["request_id"]
    other = (await fleet.post("/select_and_reserve", {"token_ids": PROMPT})).json()
    assert other["selection_id"] != said["selection_id"]
    answer = await fleet.client.delete(f"/reservations/{said['selection_id']}")
    assert answer.status_code == 200


async def test_an_unknown_model_or_group_is_503(fleet):
    for fields in ({"model_name": "zz"}, {"routing_group": "zz"}):
        status, body = await select(fleet, **fields)
        assert (status, body["code"]) == (503, "no_endpoints")


async def test_no_allowed_worker_is_503(fleet):
    status, body = await select(fleet, allowed_worker_ids=[99])
    assert (status, body["code"]) == (503, "no_endpoints")


async def test_impossible_request_names_the_filter_and_the_removed_ranks(fleet):
    constraints = {"required_taints": ["gpu=h100"]}
    status, body = await select(fleet, routing_constraints=constraints)
    assert (status, body["code"]) == (503, "no_endpoints")
    assert [each["filter"] for each in body["removed"]] == ["required_taints"]
    assert body["removed"][0]["count"] == len(body["removed"][0]["ranks"])


async def test_thresholds_of_a_model_are_shown_and_changed(fleet):
    path = "/busy_threshold"
    body = {"model": "default", "active_prefill_tokens_threshold": 10_000}
    assert (await fleet.post(path, body)).json()["active_prefill_tokens_threshold"] == 10_000
    (shown,) = (await fleet.client.get(path)).json()["thresholds"]
    assert (shown["active_prefill_tokens_threshold"], shown["busy"]) == (10_000, [])
    cleared = {"model": "default", "active_prefill_tokens_threshold": None}
    assert (await fleet.post(path, cleared)).json()["active_prefill_tokens_threshold"] is None
    answer = await fleet.post(path, {**body, "active_prefill_tokens_threshold": -1})
    assert (answer.status_code, answer.json()["field"]) == (422, "active_prefill_tokens_threshold")


async def test_the_settings_in_effect_are_shown(fleet):
    shown = (await fleet.client.get("/config")).json()
    assert shown["namespace"] == {"value": "test", "source": "set"}
    assert shown["router_temperature"] == {"value": 0.0, "source": "default"}


async def test_a_setting_without_effect_is_named_at_start_and_in_config(caplog):
    fields = {"use_kv_events": False, "policy": "predictive", "prefill_load_scale": 4.0}
    async with DirectRouter(**fields, decode_active_request_weight=2.0).running() as router:
        shown = (await router.client.get("/config")).json()
    warning = shown["prefill_load_scale"]["warning"]
    assert warning.startswith("prefill_load_scale = 4 has no effect: the policy `predictive` does")
    second = shown["decode_active_request_weight"]["warning"]
    assert f"{warning}; {second}" in caplog.messages
    assert "warning" not in shown["policy"]


async def test_a_doubled_id_is_409(fleet):
    for status in (200, 409):
        answer = await fleet.post("/select_and_reserve", {"token_ids": PROMPT, "request_id": "x"})
        assert answer.status_code == status
    assert answer.json()["code"] == "duplicate_reservation"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("DELETE", "/reservations/zz", None),
        ("POST", "/reservations/zz/prefill_complete", None),
        ("POST", "/reservations/zz/output_block", {}),
        ("GET", "/workers/99", None),
        ("PATCH", "/workers/99", {"lifecycle": "cordoned"}),
        ("POST", "/reservations", {"token_ids": [1], "request_id": "x", "worker_id": 99}),
        ("GET", "/nope", None),
    ],
)
async def test_what_does_not_exist_is_404(fleet, method, path, body):
    answer = await fleet.client.request(method, path, json=body)
    assert answer.status_code == 404
    assert answer.json()["error"]


@pytest.mark.parametrize("worker_id", ["abc", "-1", "1.5", str(2**64), "9" * 30, "٣"])
async def test_a_worker_id_that_is_none_is_400(fleet, worker_id):
    for method in ("GET", "PATCH", "DELETE"):
        answer = await fleet.client.request(method, f"/workers/{worker_id}", json={})
        assert (answer.status_code, answer.json()["field"]) == (400, "worker_id")


async def test_a_wrong_method_is_405(router):
    answer = await router.client.get("/select")
    assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/jsonx"])
async def test_another_content_type_is_415(router, content_type):
    headers = {} if content_type is None else {"content-type": content_type}
    answer = await router.client.post("/select", content=b'{"token_ids":[1]}', headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")


async def test_parameters_of_the_content_type_do_not_matter(fleet):
    headers = {"content-type": "application/json; charset=utf-8"}
    answer = await fleet.client.post("/select", content=b'{"token_ids":[1]}', headers=headers)
    assert answer.status_code == 200


async def test_broken_json_is_400(router):
    headers = {"content-type": "application/json"}
    answer = await router.client.post("/select", content=b'{"model_name":', headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (400, "malformed_body")


async def test_body_over_the_limit_is_413_and_disturbs_no_other_request(fleet):
    async def endless():
        for _ in range(64):
            yield bytes(1024 * 1024)

    headers = {"content-type": "application/json"}
    answer = await fleet.client.post("/select", content=endless(), headers=headers)
    assert (answer.status_code, answer.json()["limit_bytes"]) == (413, 32 * 1024 * 1024)
    assert (await select(fleet))[0] == 200


@pytest.mark.parametrize("fraction", [-0.5, 2])
async def test_a_decay_fraction_out_of_range_is_400(fleet, fraction):
    await fleet.post("/select_and_reserve", {"token_ids": PROMPT, "request_id": "x"})
    answer = await fleet.post("/reservations/x/output_block", {"decay_fraction": fraction})
    assert (answer.status_code, answer.json()["field"]) == (400, "decay_fraction")


@pytest.mark.parametrize("body", [[], {"lifecycle": "dead"}, {"lifecycle": 1}])
async def test_a_bad_order_is_refused(fleet, body):
    answer = await fleet.client.patch("/workers/1", json=body)
    assert answer.status_code == 422
    assert (await fleet.view(1))["lifecycle"] == "schedulable"


async def test_unknown_fields_are_passed_over(fleet):
    assert (await select(fleet, foo=1))[0] == 200


async def test_long_prompts_are_answered_alike(fleet):
    """Decoded and hashed on another thread."""
    tokens = PROMPT[:20] + [5] * 50_000
    status, body = await select(fleet, token_ids=tokens)
    assert (status, body["overlap_blocks"], body["isl_tokens"]) == (200, 5, 50_020)


async def test_many_at_once_choose_on_fresh_load(fleet):
    """No two decisions see the same load: 30 equal cold prompts spread evenly."""
    cold = list(range(1000, 1040))
    answers = await asyncio.gather(
        *(fleet.post("/select_and_reserve", {"token_ids": [*cold, n], "request_id": f"r{n}"})
          for n in range(30))
    )  # fmt: skip
    assert [answer.text for answer in answers if answer.status_code != 200] == []
    chosen = [answer.json()["worker_id"] for answer in answers]
    assert {chosen.count(worker) for worker in (1, 2, 3)} == {10}


async def test_caller_that_disconnects_is_counted_and_disturbs_no_other_request(
    fleet, eventually, caplog
):
    host, port = fleet.client.base_url.host, fleet.client.base_url.port
    _, writer = await asyncio.open_connection(host, port)
    head = "POST /select HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: 1000\r\n\r\n{{".encode())
    await writer.drain()
    writer.close()
    line = 'kv_router_refusals_total{code="client_gone",interface="http"}'
    await eventually(lambda: equals(fleet.metric(line), 1))
    assert "Traceback" not in caplog.text
    assert (await select(fleet))[0] == 200


async def test_a_caller_that_says_nothing_is_not_waited_for(nats_server):
    async with RunningRouter(nats_server.url, body_timeout_s=0.2).running() as router:
        status, answer = await router.post_a_beginning("/select")
    assert (status, answer["code"]) == (408, "body_timeout")


async def test_garbage_never_breaks_the_next_request(fleet):
    for body in (
        b"\x00" * 100,
        b'{"token_ids":[' + b"9" * 10_000,
        msgspec.msgpack.encode({"a": 1}),
    ):
        headers = {"content-type": "application/json"}
        answer = await fleet.client.post("/select", content=body, headers=headers)
        assert answer.status_code in (400, 422)
    assert (await select(fleet))[0] == 200
