"""Objectives over HTTP and the OpenAI endpoint: fields, headers, refusals, counts and warnings."""

import json
import time

import httpx
import pytest

from router.client import RouterClient
from router.core.commands import ApplyLoad
from router.protocol.loads import LoadCounters
from router.protocol.requests import SelectRequest
from router.scheduler.errors import SloNotMetError
from router.sequence.rank_table import BURSTS
from support.engines.upstreams import response, says
from support.fleets.forwarding import COMPLETION, Scene
from support.processes.running import RunningRouter
from support.values.builders import rank, report

BOOK, PROMPT = "/select_and_reserve", list(range(40))
TTFT, LLM_D, LLM_D_BEFORE = "x-kv-router-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"
PREDICTIVE = {"policy": "predictive", "worker_silence_s": 60.0}
USAGE = {"prompt_tokens": 5, "completion_tokens": 1}
ANSWER = {"id": "x", "choices": [{"index": 0, "text": "hi"}], "usage": USAGE}
ANSWERS = says(response(json.dumps(ANSWER).encode(), "200 OK", "content-type: application/json"))


def measure(router, worker, worker_id=1):
    """Let reports, in place of the worker's, teach how fast it is: 10 ms a step."""
    worker.is_reporting = False
    core, begun_s = router.service.host.core, time.monotonic() - 4.0 * 99
    for number in range(1, 100):
        counters = LoadCounters(
            steps=10 * number,
            busy_s=0.3 * number,
            prefill_tokens=2_000 * number,
            requests_received=number,
            requests_finished=number,
        )
        told = report(worker_id, report_id=10**9 + number, counters=counters)
        core.handle(ApplyLoad(told), begun_s + 4.0 * number)
    assert core.ranks.row(rank(worker_id))[BURSTS] >= 3


@pytest.fixture
async def router(nats_server):
    async with RunningRouter(nats_server.url, **PREDICTIVE).running() as router:
        measure(router, await router.worker(1))
        yield router


async def counted(router, outcome):
    labels = (
        f'model_name="default",outcome="{outcome}",policy_class="default",routing_group="default"'
    )
    return await router.metric(f"kv_router_slo_requests_total{{{labels}}}")


def asked(request_id, **fields):
    return {"token_ids": PROMPT, "request_id": request_id, **fields}


async def test_a_refused_request_learns_what_is_predicted_and_when_to_come_back(router):
    answer = await router.post(BOOK, asked("a", slo_ttft_ms=0.5))
    body = answer.json()
    assert (answer.status_code, body["code"], body["field"]) == (429, "slo_not_met", "slo_ttft_ms")
    assert body["predicted_ttft_s"] > 0.005
    assert (body["slo_ttft_ms"], body["slo_tpot_ms"]) == (0.5, None)
    assert answer.headers["retry-after"] == "1"
    assert await counted(router, "refused") == 1
    assert await router.metric("kv_router_reservations") == 0
    async with RouterClient.over_http(str(router.client.base_url)) as client:
        with pytest.raises(SloNotMetError) as refused:  # at once: it is not sent again
            await client.select_and_reserve(SelectRequest(token_ids=PROMPT, slo_ttft_ms=0.5))
    assert refused.value.predicted_ttft_s > 0.005
    assert await counted(router, "refused") == 2


async def test_the_field_precedes_our_header_and_that_precedes_those_of_llm_d(router):
    generous, tight = "10000", "0.5"
    for headers, fields, status in (
        ({TTFT: tight}, {}, 429),
        ({LLM_D: tight}, {}, 429),
        ({LLM_D_BEFORE: tight}, {}, 429),
        ({TTFT: generous, LLM_D: tight}, {}, 200),
        ({LLM_D: generous, LLM_D_BEFORE: tight}, {}, 200),
        ({TTFT: tight}, {"slo_ttft_ms": 10_000}, 200),
        ({TTFT: tight}, {"slo_unmet": "place"}, 200),
        ({"x-llm-d-slo-tpot-ms": "0.001"}, {}, 429),
    ):
        answer = await router.post("/select", {"token_ids": PROMPT, **fields}, headers=headers)
        assert answer.status_code == status, (headers, fields, answer.text)


async def test_objectives_that_are_no_time_are_refused_with_what_is_allowed(router):
    for value in ("soon", "0", "-1", "nan", "86400001", ""):
        answer = await router.post("/select", {"token_ids": PROMPT}, headers={LLM_D: value})
        body = answer.json()
        assert (answer.status_code, body["field"]) == (422, LLM_D)
        assert body["allowed"] == "milliseconds, above 0, at most 86400000"
    answer = await router.post("/select", {"token_ids": PROMPT, "slo_ttft_ms": 0})
    assert (answer.status_code, answer.json()["field"]) == (422, "slo_ttft_ms")


async def test_requests_that_are_over_are_counted_by_what_became_of_them(router):
    await router.post(BOOK, asked("a", slo_ttft_ms=60_000, slo_tpot_ms=60_000))
    assert await router.metric("kv_router_slo_promises") == 1
    await router.client.post("/reservations/a/prefill_complete")
    usage = {"usage": {"prompt_tokens": 40, "completion_tokens": 5}}
    await router.client.request("DELETE", "/reservations/a", json=usage)
    assert await counted(router, "met") == 1
    assert await router.metric("kv_router_slo_promises") == 0


async def test_another_policy_says_that_it_does_not_use_them(router):
    other = {"router_config_override": {"policy": "lmetric"}}
    answer = await router.post("/select", {"token_ids": PROMPT, "slo_ttft_ms": 0.5, **other})
    assert answer.json()["warnings"] == [
        "slo_ttft_ms = 0.5 has no effect: the policy `lmetric` does not use it; `predictive` does; "
        "whether it is met is counted"
    ]


async def test_the_openai_endpoint_refuses_as_openai_does(nats_server):
    scene = Scene.in_router(nats_server.url, {1: ANSWERS}, PREDICTIVE)
    async with scene as its:
        measure(its.router, its.workers[1])
        answer = await its.forward.complete(headers={LLM_D: "0.5"}, **COMPLETION)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (429, "rate_limit_error")
        assert (error["code"], error["param"]) == ("slo_not_met", "slo_ttft_ms")
        assert error["predicted_ttft_s"] > 0.005
        assert answer.headers["retry-after"] == "1"
        assert its.engines[1].requests == []
        nvext = {"slo_ttft_ms": 10_000}
        answer = await its.forward.complete(headers={LLM_D: "0.5"}, **COMPLETION, nvext=nvext)
        assert answer.status_code == 200, answer.text
        await its.until_free()
        assert isinstance(answer, httpx.Response)
        assert await counted(its.router, "met") == 1
