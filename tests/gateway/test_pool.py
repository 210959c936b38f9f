"""A real Envoy before the picker of an InferencePool: requests go to its pods, as they are now."""

import httpx
import pytest

from support.engines.openai_engine import OpenAiEngine
from support.fleets.direct import DirectRouter
from support.fleets.gateways import Envoy
from support.processes.api_server import FakeApiServer, pod, pool, rewrite
from support.processes.servers import eventually, free_port

pytestmark = pytest.mark.gateway


def prompt(number):
    return {"model": "gpt", "prompt": [number] * 64, "max_tokens": 1}


async def test_prompts_return_to_the_pod_that_has_them_and_leave_one_that_ends(tmp_path):
    port, picker = free_port(), free_port()
    engines = [OpenAiEngine(host=f"127.0.0.{number}", port=port) for number in (11, 12)]
    hosts = [f"{each.host}:{port}" for each in engines]
    settings = {"epp_pool": "llm/qwen", "epp_port": picker, "discovery_token_file": ""}
    envoy = Envoy(tmp_path, picker, hosts, has_tls=True, is_checked=True)
    with FakeApiServer() as server:
        server.put(pool(port), *(pod(each.host, each.host) for each in engines))
        server.put(rewrite("names", (["gpt"], ["m"])))
        router = DirectRouter(discovery_api_url=server.url, **settings)
        async with (
            engines[0].running(),
            engines[1].running(),
            router.running(),
            envoy.running(),
            httpx.AsyncClient(base_url=envoy.url, timeout=60) as client,
        ):
            await eventually(lambda: _all_exact(router, len(engines)))
            await eventually(lambda: _answers(client))
            before = [each.completions_served for each in engines]
            for _ in range(2):
                for number in range(8):
                    answer = await client.post("/v1/completions", json=prompt(number))
                    assert answer.status_code == 200, answer.text
            served = [e.completions_served - b for e, b in zip(engines, before, strict=True)]
            assert sum(served) == 16
            assert sum(each.hits for each in engines) >= 8 * 60  # each second time all but a block

            server.delete(engines[0].host)
            await eventually(lambda: _all_exact(router, 1))
            before = engines[1].completions_served
            for number in range(8):
                answer = await client.post("/v1/completions", json=prompt(number))
                assert answer.status_code == 200, answer.text
            assert engines[1].completions_served - before == 8
            server.delete(engines[1].host)
            await eventually(lambda: _all_exact(router, 0))
            await eventually(lambda: _refuses(client))


async def _all_exact(router, count):
    workers = (await router.client.get("/workers")).json()
    states = [rank["trust"]["state"] for each in workers for rank in each["ranks"]]
    return states == ["exact"] * count


async def _answers(client):
    return (await client.get("/v1/models")).status_code == 200


async def _refuses(client):
    return (await client.post("/v1/completions", json=prompt(0))).status_code == 503
