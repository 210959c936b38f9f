"""A router takes its engines from an InferencePool, and its picker serves that pool alone."""

import json
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from router.config.load import load_router
from router.errors import ConfigError
from router.forward.config import EppConfig
from router.forward.service import ForwardService
from router.runtime.process.settings import configured
from support.engines.openai_engine import OpenAiEngine
from support.fleets.direct import DirectRouter
from support.fleets.gateways import (
    DESTINATION,
    Gateway,
    body,
    chunks,
    completion,
    head,
    kinds,
    refusal,
    set_headers,
)
from support.processes.api_server import (
    LABELS,
    POOLS,
    FakeApiServer,
    objective,
    pod,
    pool,
    rewrite,
)
from support.processes.running import RunningService
from support.processes.servers import eventually, free_port

pytestmark = pytest.mark.integration

OBJECTIVES = "inferenceobjectives.llm-d.ai"


@asynccontextmanager
async def pooled(server, **fields):
    """A router with a picker before the pool llm/qwen, and a gateway."""
    port = free_port()
    settings = {
        "epp_pool": "llm/qwen",
        "epp_port": port,
        "epp_tls": False,
        "discovery_api_url": server.url,
        "discovery_token_file": "",
        "probe_interval_s": 0.0,
        **fields,
    }
    async with DirectRouter(**settings).running() as router, Gateway(port).connected() as gateway:
        yield router, gateway


@asynccontextmanager
async def engines(port, *hosts, **fields):
    found = [OpenAiEngine(host=host, port=port, **fields) for host in hosts]
    async with AsyncExitStack() as stack:
        for each in found:
            await stack.enter_async_context(each.running())
        yield found


def sees(router, *endpoints):
    """Wait for exactly these workers."""

    async def are_known():
        workers = (await router.client.get("/workers")).json()
        return {each["endpoint"] for each in workers} == {f"http://{each}" for each in endpoints}

    return eventually(are_known)


async def trust_of(router, endpoint):
    for each in (await router.client.get("/workers")).json():
        if each["endpoint"] == f"http://{endpoint}":
            return {rank["trust"]["state"] for rank in each["ranks"]}, each
    return set(), {}


async def answer(gateway, *messages, count=1):
    async with gateway.stream() as stream:
        await stream.send(*messages)
        answers = await stream.received(count)
        await stream.end()
        return answers


async def lists(gateway, endpoint):
    """Whether the picker has this endpoint."""
    asked = head("/v1/models", "GET", eos=True, subset=endpoint)
    return kinds(await answer(gateway, asked)) == ["request_headers"]


async def lacks(gateway, endpoint):
    return not await lists(gateway, endpoint)


async def not_ready(router):
    answered = await router.client.get("/ready")
    return answered.json().get("reason", "") if answered.status_code == 503 else ""


async def says(router, part):
    return part in await not_ready(router)


async def test_pods_of_the_pool_are_attached_chosen_and_leave(tmp_path):
    port, key = free_port(), tmp_path / "key"
    key.write_text("secret")
    a, b = f"127.0.0.2:{port}", f"127.0.0.3:{port}"
    with FakeApiServer() as server:
        server.unknown.add(OBJECTIVES)  # their kind need not be installed
        async with (
            engines(port, "127.0.0.2", "127.0.0.3", key="secret") as (engine, _),
            pooled(server, worker_token_file=str(key)) as (router, gateway),
        ):
            await eventually(lambda: says(router, "InferencePool llm/qwen does not exist"))
            assert await gateway.status() == 2
            server.put(pod("web", "127.0.0.9", labels="app=web"))
            server.put(pool(port), pod("a", "127.0.0.2"), pod("b", "127.0.0.3"))
            await sees(router, a, b)
            await eventually(lambda: _is_exact(router, a))
            for each in (a, b):
                await eventually(lambda each=each: lists(gateway, each))
            assert await gateway.status() == 1
            assert "Bearer secret" in engine.given_keys

            server.put(pod("b", "127.0.0.3", is_ready=False))
            await eventually(lambda: lacks(gateway, b))
            await eventually(lambda: _is_held(router, b))
            chosen = {await _chosen(gateway, prompt) for prompt in range(4)}
            assert chosen == {a}

            server.forget()
            server.delete("b")
            await sees(router, a)
            server.put(pool(port, labels="app=web"))
            await sees(router, f"127.0.0.9:{port}")
            server.delete("qwen", POOLS)
            await sees(router)
            assert "does not exist" in await not_ready(router)


async def _is_exact(router, endpoint):
    return (await trust_of(router, endpoint))[0] == {"exact"}


async def _is_held(router, endpoint):
    _, view = await trust_of(router, endpoint)
    return "its pod is not ready (b-rank-0)" in view["not_schedulable_reasons"]


async def _chosen(gateway, number):
    data = completion(model="m", prompt=[number, 2, 3, 4])
    (first, _) = await answer(gateway, head(), body(data), count=2)
    return set_headers(first)[DESTINATION]


async def test_ports_are_ranks_and_rewrites_and_objectives_of_the_pool_count():
    one, two = free_port(), free_port()
    endpoints = [f"127.0.0.4:{one}", f"127.0.0.4:{two}"]
    with FakeApiServer() as server:
        server.put(pool(one, two), pod("a", "127.0.0.4"))
        server.put(rewrite("names", (["gpt"], [("m", 1)])), objective("batch", -1))
        async with (
            engines(one, "127.0.0.4"),
            engines(two, "127.0.0.4", sources=None, events_port=free_port(), version="0.1.0"),
            pooled(server, prove_workers=False) as (router, gateway),
        ):
            await sees(router, *endpoints)
            for each in endpoints:
                await eventually(lambda each=each: lists(gateway, each))
            states, view = await trust_of(router, endpoints[1])
            assert states == {"approximate"}  # it names no event sockets
            assert "estimated" in view["attachment"]
            data = completion(model="gpt")
            head_, rest = await answer(gateway, head(), body(data), count=2)
            assert set_headers(head_)[DESTINATION] in endpoints
            ((sent, _),) = chunks([rest])
            assert json.loads(sent)["model"] == "m"
            annotations = {"llm-d.ai/active-ports": str(one)}
            server.put(pod("a", "127.0.0.4", annotations=annotations))
            await sees(router, endpoints[0])

            labels = f"{LABELS},llm-d.ai/role=prefill"
            server.put(pod("p", "127.0.0.7", annotations=annotations, labels=labels))
            async with engines(one, "127.0.0.7"):
                await eventually(lambda: _prefills(gateway, f"127.0.0.7:{one}"))


async def _prefills(gateway, endpoint):
    (first, _) = await answer(gateway, head(), body(completion(model="m")), count=2)
    return set_headers(first).get("x-prefiller-host-port") == endpoint


async def test_pickers_of_a_pool_know_each_others_bookings_without_a_leader(nats_server):
    port = free_port()
    with FakeApiServer() as server:
        server.put(pool(port), pod("a", "127.0.0.8"))
        shared = {"nats_url": nats_server.url, "prove_workers": False}
        async with (
            engines(port, "127.0.0.8"),
            pooled(server, **shared) as (_, gateway),
            pooled(server, **shared) as (other, second),
        ):
            for each in (gateway, second):
                await eventually(lambda each=each: lists(each, f"127.0.0.8:{port}"))
            async with gateway.stream() as stream:
                await stream.send(head(), body(completion(model="m")))
                await stream.received(2)
                await eventually(lambda: _has_active(other, 1))
            await eventually(lambda: _has_active(other, 0))


async def test_pickers_without_a_bus_spread_requests_as_one_does():
    """Requests reach them in turn, and stay: each counts the other's."""
    port, first, second = free_port(), free_port(), free_port()
    hosts = ("127.0.0.12", "127.0.0.13")
    with FakeApiServer() as server:
        server.put(pool(port), *(pod(f"e{n}", host) for n, host in enumerate(hosts)))

        def picker(name, own, other):
            peers = {"name": name, "http_port": own, "router_peers": f"127.0.0.1:{other}"}
            return pooled(server, prove_workers=False, **peers)

        async with (
            engines(port, *hosts),
            picker("first", first, second) as one,
            picker("second", second, first) as two,
            AsyncExitStack() as streams,
        ):
            for _, gateway in (one, two):
                for at in (f"{host}:{port}" for host in hosts):
                    await eventually(lambda at=at, gateway=gateway: lists(gateway, at))
            chosen = []
            for number in range(6):
                _, gateway = (one, two)[number % 2]
                stream = await streams.enter_async_context(gateway.stream())
                data = completion(model="m", prompt=[number, *range(8)])
                await stream.send(head(), body(data))
                (answered, _) = await stream.received(2)
                chosen.append(set_headers(answered)[DESTINATION])
                for router, _ in (one, two):
                    await eventually(lambda n=number, router=router: _has_active(router, n + 1))
            assert sorted(map(chosen.count, {*chosen})) == [3, 3]


async def test_picker_apart_from_its_router_serves_the_pool_as_it_is_in_the_cluster():
    port, health, picker = free_port(), free_port(), free_port()
    with FakeApiServer() as server:
        server.put(pool(port), pod("a", "127.0.0.9"), rewrite("names", (["gpt"], ["m"])))
        of_cluster = {"discovery_api_url": server.url, "discovery_token_file": ""}
        async with engines(port, "127.0.0.9"), pooled(server) as (router, _):
            other = {"worker_id": 2, "endpoint": "http://10.0.0.2:8000", "block_size": 4}
            await router.post("/workers", {**other, "model_name": "m"})
            config = configured(
                EppConfig,
                router_url=str(router.client.base_url),
                http_port=health,
                epp_port=picker,
                epp_health_port=0,
                epp_tls=False,
                epp_pool="llm/qwen",
                probe_interval_s=0.0,
                drain_s=0.0,
                **of_cluster,
            )
            await sees(router, f"127.0.0.9:{port}", "10.0.0.2:8000")
            apart = RunningService(ForwardService(config), health)
            async with apart.running(), Gateway(picker).connected() as gateway:
                await eventually(lambda: lists(gateway, f"127.0.0.9:{port}"))
                data = completion(model="gpt")
                (_, rest) = await answer(gateway, head(), body(data), count=2)
                assert json.loads(chunks([rest])[0][0])["model"] == "m"
                assert {await _chosen(gateway, n) for n in range(6)} == {f"127.0.0.9:{port}"}
                server.delete("qwen", POOLS)
                await eventually(lambda: says(apart, "InferencePool llm/qwen does not exist"))
                assert await gateway.status() == 2


async def _has_active(router, count):
    loads = (await router.client.get("/loads")).json()
    return sum(rank["active_requests"] for scope in loads for rank in scope["loads"]) == count


async def test_missing_rights_are_said_once_and_end(caplog):
    port = free_port()
    forbidden = f'{POOLS} is forbidden: User "system:serviceaccount:llm:kv-router"'
    with FakeApiServer() as server:
        server.put(pool(port), pod("a", "127.0.0.5"))
        server.denied.add(POOLS)
        async with pooled(server) as (router, gateway):
            await eventually(lambda: says(router, forbidden))
            asked = head("/v1/models", "GET", eos=True)
            assert refusal(await answer(gateway, asked))[0] == 503
            server.denied.clear()
            await sees(router, f"127.0.0.5:{port}")
    said = [each.getMessage() for each in caplog.records if forbidden in each.getMessage()]
    assert len(said) == 1


@pytest.mark.parametrize("name", ["LLM/qwen", "a/b/c", "/qwen", "llm/"])
def test_pool_that_cannot_be_is_refused_at_start(name):
    with pytest.raises(ConfigError) as caught:
        load_router(["--epp-pool", name], {})
    assert caught.value.key == "epp_pool"
