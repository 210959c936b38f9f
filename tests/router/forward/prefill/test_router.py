"""Prompts that one worker computes and another answers, before a real router and scripted
engines.
"""

import asyncio
import json

import pytest

from support.engines.upstreams import (
    STREAM_END,
    STREAM_HEAD,
    event,
    hangs,
    hangs_up,
    response,
    says,
)
from support.fleets.forwarding import COMPLETION, RunningForward, Scene
from support.processes.servers import eventually

JSON = "content-type: application/json"
NIXL = {"do_remote_prefill": True, "remote_block_ids": [[3, 4]], "remote_host": "h"}


def answer(text, cached=0, **fields):
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    body = {"id": "x", "choices": [{"index": 0, "text": text}], "usage": usage, **fields}
    return response(json.dumps(body).encode(), "200 OK", JSON)


PREFILLS = says(answer("p", cached=3, kv_transfer_params=NIXL))
ANSWERS = says(answer("d", cached=4))
BAD = response(b'{"error": {"message": "too long"}}', "400 Bad Request", JSON)
BREAKS = response(b"{}", "500 Internal Server Error", JSON)
POOLS = {1: "prefill", 2: "decode"}


@pytest.fixture
def scene(nats_server):
    def of(*scripts, roles=POOLS, **fields):
        return Scene.of(nats_server.url, dict(enumerate(scripts, 1)), roles=roles, **fields)

    return of


async def outcomes(its):
    """Prompts by what became of them."""
    text = (await its.forward.client.get("/metrics")).text
    begins = 'kv_router_forward_prefills_total{outcome="'
    rows = [row.removeprefix(begins) for row in text.splitlines() if row.startswith(begins)]
    return {row.partition('"')[0]: int(float(row.rpartition(" ")[2])) for row in rows}


async def refusals(its):
    """What the router has refused, as rows of its metrics."""
    text = (await its.router.client.get("/metrics")).text
    return [row for row in text.splitlines() if row.startswith("kv_router_refusals_total{")]


async def state(its):
    """The state in which the one model is."""
    text = (await its.forward.client.get("/metrics")).text
    begins = 'kv_router_forward_prefill_pools{state="'
    rows = [row.removeprefix(begins) for row in text.splitlines() if row.startswith(begins)]
    return [row.partition('"')[0] for row in rows if row.endswith(" 1.0")]


async def counted(its, expected):
    """Answers are out before all of them is counted."""

    async def is_so():
        return await outcomes(its) == expected

    await eventually(is_so)


async def test_one_computes_the_prompt_and_another_answers(scene):
    async with scene(PREFILLS, ANSWERS) as its:
        got = await its.forward.complete(max_tokens=7, headers={"x-request-id": "r"})
        assert got.json()["choices"][0]["text"] == "d"
        assert (got.headers["x-worker-id"], got.headers["x-prefill-worker-id"]) == ("2", "1")
        assert got.headers["x-prefill-predicted-cached-tokens"] == "0"
        assert got.headers["x-prefill-cached-tokens"] == "3"
        (prompt,), (whole,) = its.asked(1), its.asked(2)
        params = prompt.pop("kv_transfer_params")
        assert (params["do_remote_decode"], params["remote_block_ids"]) == (True, None)
        assert prompt == {**COMPLETION, "max_tokens": 1, "min_tokens": 1, "stream": False}
        assert whole == {**COMPLETION, "max_tokens": 7, "kv_transfer_params": NIXL}
        heads = [its.engines[each].requests[0][0] for each in (1, 2)]
        assert all("x-request-id: r" in head for head in heads)
        await its.until_free()
        await counted(its, {"handed_over": 1})
        assert await state(its) == ["active"]
        assert await its.forward.metric("kv_router_forward_handed_over_tokens_total") == 4
        for name in ("prefill_seconds_count", "hand_over_seconds_count"):
            assert await its.forward.metric(f"kv_router_forward_{name}") == 1


async def test_a_stream_is_answered_likewise(scene):
    piece = event({"id": "i", "choices": [{"index": 0, "text": "a", "finish_reason": "length"}]})
    streams = says(STREAM_HEAD, piece, event(b"[DONE]"), STREAM_END)
    async with scene(PREFILLS, streams) as its:
        got = await its.forward.complete(stream=True)
        assert got.headers["x-prefill-worker-id"] == "1"
        assert '"text":"a"' in got.text.replace(" ", "")
        assert its.asked(1)[0]["stream"] is False
        assert its.asked(2)[0]["kv_transfer_params"] == NIXL
        await its.until_free()


async def test_while_the_prompt_is_computed_it_is_booked_there_and_only_there(scene):
    go_on = asyncio.Event()

    async def prefills(_, writer):
        await go_on.wait()
        writer.write(answer("p", kv_transfer_params=NIXL))

    async with scene(prefills, ANSWERS) as its:

        async def booked():
            loads = (await its.router.client.get("/loads")).json()
            ranks = [rank for scope in loads for rank in scope["loads"]]
            shown = [(r["potential_prefill_tokens"], r["potential_decode_blocks"]) for r in ranks]
            return shown == [(5, 0), (0, 0)]

        asking = asyncio.create_task(its.forward.complete())
        await eventually(booked)
        go_on.set()
        assert (await asking).status_code == 200
        await its.until_free()


async def test_workers_of_role_prefill_serve_no_completions(scene):
    async with scene(PREFILLS, PREFILLS, roles={1: "prefill", 2: "prefill"}) as its:
        got = await its.forward.complete()
        assert (got.status_code, got.json()["error"]["code"]) == (503, "no_endpoints")
        assert "role removed" in got.json()["error"]["message"]


async def test_without_prefill_workers_requests_are_unchanged(scene):
    async with scene(ANSWERS, roles={}) as its:
        before = await refusals(its)  # of the test, which asks for its worker until it is there
        got = await its.forward.complete()
        assert "x-prefill-worker-id" not in got.headers
        assert its.asked(1) == [COMPLETION]
        assert (await outcomes(its), await state(its)) == ({}, ["pending"])
        asked = {"annotations": ["query_instance_id"]}
        assert (await its.forward.complete(nvext=asked)).status_code == 200
        assert await refusals(its) == before  # to look is nothing to be alarmed at


async def test_prefill_pools_appear_and_disappear(scene):
    async with scene(PREFILLS, ANSWERS) as its:
        await its.forward.complete()
        assert await state(its) == ["active"]
        await its.router.client.patch("/workers/1", json={"lifecycle": "cordoned"})
        assert (await its.forward.complete()).json()["choices"][0]["text"] == "d"
        assert await state(its) == ["unavailable"]
        assert "kv_transfer_params" not in its.asked(2)[-1]
        await its.router.client.patch("/workers/1", json={"lifecycle": "schedulable"})

        async def is_back():
            return "x-prefill-worker-id" in (await its.forward.complete()).headers

        await eventually(is_back)
        assert await state(its) == ["active"]


@pytest.mark.parametrize("script", [hangs_up, says(BREAKS), says(b"garbage\r\n\r\n")])
async def test_failed_prefill_is_retried_on_another_worker(scene, script):
    roles = {1: "prefill", 2: "prefill", 3: "decode"}
    async with scene(script, PREFILLS, ANSWERS, roles=roles) as its:
        for _ in range(4):
            got = await its.forward.complete()
            assert got.json()["choices"][0]["text"] == "d"
            assert got.headers["x-prefill-worker-id"] == "2"
        await its.until_free()
        assert (await outcomes(its))["handed_over"] == 4


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (hangs_up, "prefill_failed"),
        (says(BREAKS), "prefill_failed"),
        (hangs, "prefill_failed"),
        (says(answer("p")), "no_hand_over"),
    ],
)
@pytest.mark.parametrize("falls_back", ["always", "unregistered"])
async def test_failed_prefill_falls_back_or_is_answered(scene, script, reason, falls_back):
    fields = {"prefill_fallback": falls_back}
    if script is hangs:
        fields["prefill_timeout_s"] = 0.5
    async with scene(script, ANSWERS, **fields) as its:
        got = await its.forward.complete()
        if falls_back == "always":
            assert (got.status_code, got.json()["choices"][0]["text"]) == (200, "d")
            assert its.asked(2) == [COMPLETION]
        else:
            assert (got.status_code, got.json()["error"]["code"]) == (502, reason)
            assert its.asked(2) == []
        await its.until_free()
        ended = "fell_back" if falls_back == "always" else "refused"
        failed = {"failed": 1} if reason == "prefill_failed" else {}
        await counted(its, {ended: 1, **failed})


@pytest.mark.parametrize("falls_back", ["always", "unregistered"])
async def test_without_prefill_workers_the_decode_worker_computes_the_prompt(scene, falls_back):
    async with scene(PREFILLS, ANSWERS, prefill_fallback=falls_back) as its:
        await its.forward.complete()
        await its.router.client.patch("/workers/1", json={"lifecycle": "cordoned"})
        assert (await its.forward.complete()).status_code == 200
        await counted(its, {"handed_over": 1, "unavailable": 1})


async def test_refused_prompt_is_answered_by_the_decode_worker(scene):
    async with scene(says(BAD), says(BAD), prefill_fallback="unregistered") as its:
        got = await its.forward.complete()
        assert (got.status_code, got.json()) == (400, {"error": {"message": "too long"}})
        await counted(its, {"not_taken": 1})


async def test_handover_is_used_once(scene):
    """The next worker computes the prompt: blocks are freed once they were fetched."""
    roles = {1: "prefill", 2: "decode", 3: "decode"}
    turns = iter([hangs_up, ANSWERS])

    async def first_fails(upstream, writer):
        await next(turns)(upstream, writer)

    async with scene(PREFILLS, first_fails, first_fails, roles=roles) as its:
        got = await its.forward.complete()
        assert (got.status_code, got.headers["x-forward-attempts"]) == (200, "2")
        sent = [*its.asked(2), *its.asked(3)]
        assert sum("kv_transfer_params" in body for body in sent) == 1
        assert len(its.asked(1)) == 1
        await its.until_free()


async def test_engines_that_push_are_told_who_will_decode(scene):
    """From their second prompt on, and then that worker is preferred."""
    said = {"do_remote_prefill": True, "pushed": 3}
    pushes = says(answer("p", kv_transfer_params=said))
    roles = {1: "prefill", 2: "decode", 3: "decode"}
    async with scene(pushes, ANSWERS, ANSWERS, roles=roles) as its:
        answers = [await its.forward.complete() for _ in range(5)]
        first, *others = [body["kv_transfer_params"].get("target") for body in its.asked(1)]
        assert first is None
        decoded = [int(each.headers["x-worker-id"]) for each in answers[1:]]
        assert others == [{"worker_id": each, "dp_rank": 0} for each in decoded]
        assert its.asked(decoded[0])[-1]["kv_transfer_params"] == said
        await its.until_free()


async def test_disconnected_client_cancels_the_prefill(scene):
    async with scene(hangs, ANSWERS) as its:
        asking = asyncio.create_task(its.forward.complete())
        await eventually(lambda: its.engines[1].requests)
        asking.cancel()
        await eventually(lambda: its.engines[1].gone == 1)
        await its.until_free()
        assert its.asked(2) == []


async def test_named_prefill_worker_computes_the_prompt(scene):
    roles = {1: "prefill", 2: "prefill", 3: "decode"}
    async with scene(PREFILLS, PREFILLS, ANSWERS, roles=roles) as its:
        for _ in range(3):
            got = await its.forward.complete(headers={"x-prefill-instance-id": "2"})
            assert got.headers["x-prefill-worker-id"] == "2"
        got = await its.forward.complete(headers={"x-prefill-instance-id": "3"})
        assert "x-prefill-worker-id" not in got.headers  # it is done already, then
        assert len(its.asked(2)) == 3


async def test_client_with_its_own_handover_is_not_touched(scene):
    async with scene(PREFILLS, ANSWERS) as its:
        own = {"do_remote_prefill": True, "remote_engine_id": "e"}
        await its.forward.complete(kv_transfer_params=own)
        assert its.asked(2)[0]["kv_transfer_params"] == own
        assert its.asked(1) == []


async def test_query_names_the_prefill_and_the_decode_worker(scene):
    async with scene(PREFILLS, ANSWERS) as its:
        got = await its.forward.complete(nvext={"annotations": ["query_instance_id"]})
        place = got.json()["nvext"]["worker_id"]
        assert place == {
            "prefill_worker_id": 1, "prefill_dp_rank": 0, "decode_worker_id": 2,
            "decode_dp_rank": 0,
        }  # fmt: skip
        assert its.asked(1) == its.asked(2) == []
        await its.until_free()


async def test_client_or_condition_may_skip_prefill(scene):
    long, short = list(range(3000)), list(range(1500))
    async with scene(PREFILLS, ANSWERS, conditional_disagg="isl_bounding",
                     conditional_eff_isl_ratio_threshold=1.1) as its:  # fmt: skip
        await its.forward.complete(prompt=long)
        assert len(its.asked(1)) == 1
        await its.forward.complete(prompt=short)
        annotated = {"annotations": ["x-bypass-remote-prefill"]}
        await its.forward.complete(prompt=long, nvext=annotated)
        assert (len(its.asked(1)), len(its.asked(2))) == (1, 3)
        await counted(its, {"handed_over": 1, "bypassed": 2})


async def test_remote_prefill_can_be_disabled(scene):
    async with scene(PREFILLS, ANSWERS, disaggregation="off") as its:
        assert (await its.forward.complete()).json()["choices"][0]["text"] == "d"
        assert its.asked(1) == []


async def test_forwarders_share_prefill_pools_and_failures(scene, nats_server):
    """Over the bus: that there is a pool, and which workers fail."""
    failing = asyncio.Event()

    async def fails_later(upstream, writer):
        await (hangs_up if failing.is_set() else PREFILLS)(upstream, writer)

    def on_the_bus(its):
        bus = {"nats_url": nats_server.url, "namespace": "test", "probe_interval_s": 0}
        return RunningForward(str(its.router.client.base_url), breaker_failures=5, **bus)

    async with scene(fails_later, ANSWERS) as its:
        one, other = on_the_bus(its), on_the_bus(its)
        async with one.running(), other.running():
            state = 'kv_router_forward_prefill_pools{state="active"}'

            async def is_heard():
                await one.complete()
                return await other.metric(state) == 1

            assert await other.metric(state) == 0
            await eventually(is_heard)
            await other.complete()  # of two workers one may be left alone
            failing.set()
            for _ in range(5):
                await one.complete()

            async def is_left_alone():
                return await other.metric("kv_router_forward_ejected_workers") == 1

            await eventually(is_left_alone)


# ── Blocks of other workers ──────────────────────────────────────────────────────────────────────

P2P = {worker_id: [f"vllm-p2p://h{worker_id}:5710"] for worker_id in (1, 2, 3)}
AT_3 = {"remote_host": "h3", "remote_port": 5710}


async def test_each_engine_tried_is_told_the_source_under_an_id_of_its_own(scene):
    async with scene(hangs_up, hangs_up, hangs_up, roles={}, shared=P2P) as its:
        await its.holds(3, COMPLETION["prompt"])
        assert (await its.forward.complete()).status_code == 502
        bodies = its.asked(1) + its.asked(2)
        sent = [body["kv_transfer_params"]["remote_kv_source"] for body in bodies]
        ids = [each.pop("kv_request_id") for each in sent]
        assert (sent, len({*ids})) == ([AT_3] * 2, 2)
        assert all(body["kv_transfer_params"].keys() == {"remote_kv_source"} for body in bodies)
        assert its.asked(3) == []


@pytest.mark.parametrize("client", [{"do_remote_decode": True}, {"remote_prefiller": {"x": 1}}])
async def test_a_client_that_arranges_the_transfer_is_left_alone(scene, client):
    async with scene(ANSWERS, hangs_up, roles={}, shared=P2P) as its:
        await its.holds(2, COMPLETION["prompt"])
        await its.forward.complete(kv_transfer_params=client)
        assert its.asked(1)[0]["kv_transfer_params"] == client


async def test_callers_of_the_router_learn_where_the_engine_reads(scene):
    async with scene(hangs_up, hangs_up, hangs_up, roles={}, shared=P2P) as its:
        await its.holds(3, COMPLETION["prompt"])
        body = {"token_ids": COMPLETION["prompt"]}
        decision = (await its.router.client.post("/select", json=body)).json()
        source = {"worker_id": 3, "dp_rank": 0, "blocks": 1, "tier": "device"}
        assert decision["source"] == {**source, "remote_kv_source": AT_3}
