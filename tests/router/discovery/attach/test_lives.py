"""Engines that die and return, that have two URLs, or share one, before real servers."""

from contextlib import AsyncExitStack

from support.engines.openai_engine import OpenAiEngine
from support.fleets.direct import DirectRouter
from support.processes.servers import eventually, free_port


async def sentences(router):
    return [each["attachment"] or "" for each in (await router.client.get("/workers")).json()]


async def until_said(router, clause):
    async def is_said():
        return any(clause in each for each in await sentences(router))

    await eventually(is_said, timeout_s=30)


async def test_engine_that_returns_is_proved_again_and_keeps_its_rates(caplog):
    port, common = free_port(), {"fingerprint": "vllm-0.32.0-aa"}
    with caplog.at_level("INFO"):
        async with DirectRouter(workers=f"http://127.0.0.1:{port}").running() as router:
            async with OpenAiEngine(port=port, started_s=100.0, **common).running():
                await until_said(router, "proved by a request")
            await until_said(router, "gone: nothing listens there; retrying each second")
            second = OpenAiEngine(port=port, started_s=200.0, **common)
            async with second.running():
                await eventually(lambda: "rates kept (same system_fingerprint)" in caplog.text)
                await until_said(router, "proved by a request")
                assert second.completions_served == 1


async def test_engine_that_returns_with_other_flags_is_said(caplog):
    port = free_port()
    with caplog.at_level("INFO"):
        async with DirectRouter(workers=f"http://127.0.0.1:{port}").running() as router:
            async with OpenAiEngine(port=port, started_s=100.0, fingerprint="v-aa").running():
                await until_said(router, "proved by a request")
                (before,) = (await router.client.get("/workers")).json()
            await until_said(router, "gone")
            async with OpenAiEngine(port=port, started_s=200.0, fingerprint="v-bb").running():
                said = "with other flags (fingerprint v-aa → v-bb): rates learned anew"
                await eventually(lambda: said in caplog.text)
                (after,) = (await router.client.get("/workers")).json()
                assert after["incarnation"] != before["incarnation"]


async def test_second_url_of_an_engine_is_counted_once():
    engine = OpenAiEngine()
    other_name = engine.url.replace("127.0.0.1", "localhost")
    fields = {"workers": f"{engine.url},{other_name}"}
    async with engine.running(), DirectRouter(**fields).running() as router:
        said = f"{other_name} is {engine.url} (one request was seen on both): counted once"
        await until_said(router, said)
        views = (await router.client.get("/workers")).json()
        assert {each["endpoint"]: each["lifecycle"] for each in views} == {
            engine.url: "schedulable",
            other_name: "incomplete",
        }


async def test_second_url_is_found_by_its_process_without_events():
    engine = OpenAiEngine(sources={}, started_s=100.25)
    other_name = engine.url.replace("127.0.0.1", "localhost")
    engine.prompt_tokens = 77
    fields = {"workers": f"{engine.url},{other_name}"}
    async with engine.running(), DirectRouter(**fields).running() as router:
        await until_said(router, "(same process, same counters): counted once")


async def test_second_server_of_the_same_sockets_is_counted_once():
    engine = OpenAiEngine()
    other = OpenAiEngine(sources=engine.own_sources())
    fields = {"workers": f"{engine.url},{other.url}"}
    async with engine.running(), other.running(), DirectRouter(**fields).running() as router:
        await until_said(router, "(same event sockets): counted once")


async def test_second_url_serves_when_the_first_is_gone():
    engine = OpenAiEngine()
    port = free_port()
    other = OpenAiEngine(sources=engine.own_sources(), port=port)
    async with (
        engine.running(),
        DirectRouter(workers=f"http://127.0.0.1:{port},{engine.url}").running() as router,
    ):
        async with other.running():
            await until_said(router, "(same event sockets): counted once")
        await until_said(router, f"{engine.url}  vLLM")


async def test_balancer_before_several_engines_is_said():
    engine = OpenAiEngine(started_s=200.0)
    async with engine.running(), DirectRouter(workers=engine.url).running() as router:
        await until_said(router, "proved by a request")
        engine.started_s = 100.0
        await until_said(router, "a load balancer? Name the engines themselves")
        (worker,) = (await router.client.get("/workers")).json()
        trust = worker["ranks"][0]["trust"]
        assert trust["state"] in ("degraded", "blind")


async def test_engine_of_another_model_or_block_size_is_a_difference():
    one, other = OpenAiEngine(), OpenAiEngine(block_size=8)
    third = OpenAiEngine(models=[{"id": "llama", "owned_by": "vllm"}])
    fields = {"workers": f"{one.url},{other.url},{third.url}"}
    engines = one.running(), other.running(), third.running()
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        router = await stack.enter_async_context(DirectRouter(**fields).running())
        await until_said(router, f"blocks of 8 tokens, those of {one.url} 4: each matched")
        await until_said(router, f"serves 'llama', not 'm' as {one.url} does: a pool")
