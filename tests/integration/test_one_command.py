"""One command before running engines: attached by URL, and asked through the OpenAI endpoint."""

import httpx

from support.engines.openai_engine import OpenAiEngine
from support.fleets.direct import DirectRouter
from support.processes.servers import equals, eventually, free_port

PROMPT = list(range(1, 42))


async def test_repeated_completion_reaches_the_engine_that_holds_its_prefix():
    port = free_port()
    one, other = OpenAiEngine(), OpenAiEngine()
    fields = {"workers": f"{one.url},{other.url}", "openai_port": port}
    async with one.running(), other.running(), DirectRouter(**fields).running() as router:

        async def lifecycles():
            return [each["lifecycle"] for each in (await router.client.get("/workers")).json()]

        await eventually(lambda: equals(lifecycles(), ["schedulable"] * 2))
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 1}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            first = await client.post("/v1/completions", json=body)
            assert first.status_code == 200
            home = int(first.headers["x-worker-id"])

            async def is_indexed():
                overlaps = await router.overlaps(PROMPT, model_name="m")
                return overlaps.get((home, 0)) == 10 and await is_idle()

            async def is_idle():
                ranks = (await router.client.get(f"/workers/{home}")).json()["ranks"]
                return not any(rank["active_requests"] for rank in ranks)

            await eventually(is_indexed)
            for _ in range(5):
                await eventually(is_idle)
                again = await client.post("/v1/completions", json=body)
                assert int(again.headers["x-worker-id"]) == home
                cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached == 40
