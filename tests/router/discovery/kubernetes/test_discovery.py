"""A router finds its engines in a cluster, and loses them only when they are gone."""

import json
from contextlib import asynccontextmanager

import pytest

from router.errors import ConfigError
from router.runtime.process.settings import id_of_name
from support.fleets.direct import BLOCK_SIZE, DirectEngine, DirectRouter
from support.processes.api_server import LABELS, FakeApiServer, endpoint_slice, pod
from support.processes.servers import eventually

PROMPT = [*range(8)]
TEMPLATE = json.dumps({"endpoint": "http://{ip}:8000", "block_size": BLOCK_SIZE})


@asynccontextmanager
async def router_of(server, tmp_path, kind="pods", **fields):
    token = tmp_path / "token"
    if not token.exists():
        token.write_text("first")
    found = {
        "discovery": kind,
        "discovery_selector": LABELS,
        "discovery_worker": TEMPLATE,
        "discovery_namespace": "llm",
        "discovery_api_url": server.url,
        "discovery_token_file": str(token),
        "discovery_timeout_s": 5.0,
        **fields,
    }
    async with DirectRouter(**found).running() as router:
        yield router


def said(engine):
    """What a pod says of an engine on ports of its own."""
    body = engine.body()
    return {key: body[key] for key in ("kv_events_endpoints", "replay_endpoints")}


def sees(router, *names):
    async def are_known():
        workers = (await router.client.get("/workers")).json()
        return {w["worker_id"] for w in workers} == {id_of_name(name) for name in names}

    return eventually(are_known)


async def metric(router, name):
    return await router.metric(f"kv_router_discovery_{name}")


@pytest.mark.integration
async def test_pods_become_engines_and_deleted_pods_leave(tmp_path):
    with FakeApiServer() as server, DirectEngine(1) as a, DirectEngine(2) as b:
        server.put(pod("a", said=said(a)))
        server.put(pod("other", labels="app=web"))
        async with router_of(server, tmp_path) as router:
            await sees(router, "a")
            view = await router.view(id_of_name("a"))
            assert view["endpoint"] == "http://127.0.0.1:8000"
            await router.until_exact(id_of_name("a"))
            a.cache(PROMPT)

            async def is_cached():
                return (await router.overlaps(PROMPT)).get((id_of_name("a"), 0)) == 2

            await eventually(is_cached)
            server.put(pod("b", said=said(b)))
            await sees(router, "a", "b")
            server.put(pod("b", said=said(b), is_ending=True))
            await sees(router, "a")
            server.delete("a")
            await sees(router)
            assert await metric(router, "lists_total") == 1
            assert await metric(router, "changes_total") == 3
            assert await metric(router, "synced") == 1


@pytest.mark.integration
async def test_endpoints_of_a_service_become_engines(tmp_path):
    with FakeApiServer() as server, DirectEngine(1) as engine:
        template = engine.body(endpoint="http://{ip}:8000")
        template = json.dumps({k: v for k, v in template.items() if k != "worker_id"})
        server.put(endpoint_slice("s-1", ("a", "127.0.0.1", True)))
        server.put(endpoint_slice("s-2"))
        fields = {"kind": "endpointslices", "discovery_worker": template}
        async with router_of(server, tmp_path, **fields) as router:
            await sees(router, "a")
            server.put(endpoint_slice("s-1", ("a", "127.0.0.1", False)))
            await sees(router)


@pytest.mark.integration
async def test_a_watch_goes_on_where_it_ended_and_lists_again_where_it_was_forgotten(tmp_path):
    with FakeApiServer(page=2) as server, DirectEngine(1) as a, DirectEngine(2) as b:
        server.put(pod("a", said=said(a)))
        server.put(pod("x", labels="app=web"))
        async with router_of(server, tmp_path) as router:
            await sees(router, "a")
            await eventually(lambda: any("watch" in each for each in server.asked))
            server.bookmark()
            server.break_watches()
            await eventually(lambda: sum("watch" in each for each in server.asked) >= 2)
            versions = [int(e["resourceVersion"]) for e in server.asked if "watch" in e]
            assert versions == sorted(versions)
            assert versions[-1] > versions[0]
            assert await metric(router, "lists_total") == 1
            server.delete("a")
            server.put(pod("b", said=said(b)))
            server.forget()
            await sees(router, "b")
            await eventually(lambda: _at_least(router, "forgotten_total", 1))
            assert await metric(router, "lists_total") >= 2


async def _at_least(router, name, least):
    return await metric(router, name) >= least


@pytest.mark.integration
async def test_engines_stay_while_the_api_server_is_away(tmp_path):
    with DirectEngine(1) as a, DirectEngine(2) as b:
        server = FakeApiServer().start()
        try:
            server.put(pod("a", said=said(a)))
            async with router_of(server, tmp_path) as router:
                await sees(router, "a")
                server.break_watches()
                server.stop()
                await eventually(lambda: _at_least(router, "failures_total", 2))
                assert await metric(router, "synced") == 0
                await sees(router, "a")
                server.put(pod("b", said=said(b)))
                server.start()
                await sees(router, "a", "b")
        finally:
            server.stop()


@pytest.mark.integration
async def test_a_token_that_was_replaced_is_read_again(tmp_path):
    (tmp_path / "token").write_text("old")
    with FakeApiServer(token="new") as server, DirectEngine(1) as engine:
        server.put(pod("a", said=said(engine)))
        async with router_of(server, tmp_path) as router:
            await eventually(lambda: server.refused >= 1)
            (tmp_path / "token").write_text("new\n")
            await sees(router, "a")


@pytest.mark.integration
async def test_unready_pod_stays_for_a_while_and_is_not_added(tmp_path):
    with FakeApiServer() as server, DirectEngine(1) as a, DirectEngine(2) as b:
        server.put(pod("a", said=said(a)))
        server.put(pod("b", said=said(b), is_ready=False))
        async with router_of(server, tmp_path, discovery_unready_s=1000.0) as router:
            await sees(router, "a")
            server.put(pod("a", said=said(a), is_ready=False))
            line = 'kv_router_discovery_workers{state="unready"}'
            await eventually(lambda: _is(router, line, 2))
            await sees(router, "a")
        async with router_of(server, tmp_path, discovery_unready_s=0.0) as router:
            await eventually(lambda: _is(router, line, 2))
            await sees(router)


async def _is(router, line, value):
    return await router.metric(line) == value


@pytest.mark.integration
async def test_engines_beyond_the_limit_are_refused(tmp_path):
    with FakeApiServer() as server, DirectEngine(1) as a, DirectEngine(2) as b:
        server.put(pod("m", said=said(a)))
        async with router_of(server, tmp_path, discovery_max_workers=1) as router:
            await sees(router, "m")
            server.put(pod("b", said=said(b)))
            await eventually(
                lambda: _is(router, 'kv_router_discovery_workers{state="over_limit"}', 1)
            )
            await sees(router, "m")
            server.delete("m")
            await sees(router, "b")


@pytest.mark.integration
async def test_invalid_pod_is_refused_alone(tmp_path):
    refused = 'kv_router_discovery_workers{state="refused"}'
    with FakeApiServer() as server, DirectEngine(1) as a:
        server.put(pod("a", said=said(a)))
        server.put(pod("b", said={"block_size": "many"}))
        server.put(pod("c", said={"worker_id": 3}))
        server.put(pod("d", said=said(a)))  # a's sockets
        server.put(pod("e", ip="8.8.8.8", said={"kv_events_endpoint": "tcp://{ip}:5557"}))
        async with router_of(server, tmp_path) as router:
            await eventually(lambda: _is(router, refused, 4))
            await sees(router, "a")


@pytest.mark.integration
async def test_after_a_restart_those_that_are_gone_are_forgotten(tmp_path):
    data_dir = str(tmp_path / "data")
    with FakeApiServer() as server, DirectEngine(1) as a, DirectEngine(2) as b:
        server.put(pod("a", said=said(a)))
        async with router_of(server, tmp_path, data_dir=data_dir) as router:
            await sees(router, "a")
            await router.register(b)
        server.delete("a")
        async with router_of(server, tmp_path, data_dir=data_dir) as router:
            await eventually(lambda: _is(router, "kv_router_discovery_synced", 1))

            async def only_the_registered():
                workers = (await router.client.get("/workers")).json()
                return [w["worker_id"] for w in workers] == [2]

            await eventually(only_the_registered)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"discovery_worker": "{"}, "discovery_worker"),
        ({"discovery_worker": '{"endpont": "x"}'}, "discovery_worker"),
        ({"discovery_worker": '{"block_size": "x"}'}, "discovery_worker"),
        ({"discovery_api_url": ""}, "discovery_api_url"),
        ({"discovery_namespace": ""}, "discovery_namespace"),
    ],
)
def test_settings_that_lead_nowhere_are_refused_at_start(tmp_path, fields, field):
    known = {"discovery_api_url": "http://127.0.0.1:1", "discovery_namespace": "llm"}
    settings = {"discovery": "pods", "discovery_selector": LABELS, **known, **fields}
    with pytest.raises(ConfigError) as caught:
        DirectRouter(**settings)
    assert caught.value.key == field
