"""A wrong registration is said on every surface within five seconds, before real servers."""

import asyncio
import time

import pytest

from router.cli import main
from support.engines.openai_engine import OpenAiEngine
from support.engines.zmq_engines import Engine, stored
from support.fleets.direct import DirectEngine, DirectRouter
from support.processes.servers import equals, eventually, free_port

WITHIN_S = 5.0
TOKENS = list(range(12))


def watching():
    return DirectRouter(check_workers=True)


def registered(engine, events_port, **fields):
    endpoint = f"tcp://127.0.0.1:{events_port}"
    body = {"worker_id": 1, "model_name": "m", "endpoint": engine.url, "block_size": 4}
    return {**body, "kv_events_endpoint": endpoint, **fields}


def dead_event_port(engine):
    return registered(engine, free_port())


def http_port_as_event_port(engine):
    return registered(engine, engine.port)


def wrong_block_size(engine):
    return registered(engine, engine.engine.port, block_size=16)


def unknown_field(engine):
    return registered(engine, engine.engine.port)


def wrong_model(engine):
    return registered(engine, engine.engine.port, model_name="other")


def no_process_at_all(engine):
    return registered(engine, free_port(), endpoint=f"http://127.0.0.1:{free_port()}")


PUBLISHED = {wrong_block_size: {}, unknown_field: {"tenant": "x"}}
"""Fields of the event that an engine publishes, where it is an event that is wrong."""

FIELD = (
    "events carry the field `tenant` of BlockStored, which this version does not know: "
    "blocks may be other than announced"
)

WRONG = [
    (dead_event_port, "nothing listens there", "approximate", True),
    (http_port_as_event_port, "is it the HTTP port", "approximate", True),
    (wrong_block_size, "blocks of 4 tokens, registered 16", "degraded", True),
    (unknown_field, FIELD, "degraded", True),
    (wrong_model, "serves 'm', not 'other'", None, False),
    (no_process_at_all, "nor its event sockets ever answered", "unreachable", False),
]


async def faults(router):
    ready = (await router.client.get("/ready?verbose")).json()
    return ready["reason"], ready["degraded"]


async def reasons(router):
    view = await router.view(1)
    return view["not_schedulable_reasons"], [each["trust"]["reason"] for each in view["ranks"]]


async def trust_state(router):
    return (await router.view(1))["ranks"][0]["trust"]["state"]


async def inspected(router, capsys):
    await asyncio.to_thread(main, ["inspect", "--url", str(router.client.base_url), "workers"])
    return capsys.readouterr().out


async def on_the_dashboard(router):
    """The first frame of its stream: all rows and totals."""
    async with router.client.stream("GET", "/dashboard/stream") as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                return line
    raise AssertionError("no frame")


@pytest.mark.parametrize(("wrong", "clause", "state", "is_ready"), WRONG)
async def test_wrong_registration_is_said_on_every_surface(
    wrong, clause, state, is_ready, caplog, capsys
):
    engine = OpenAiEngine()
    async with engine.running(), watching().running() as router:
        assert (await router.post("/workers", wrong(engine))).status_code == 201
        if wrong in PUBLISHED:
            await eventually(lambda: engine.engine.is_heard)
            engine.engine.publish(stored([11, 22, 33], TOKENS, **PUBLISHED[wrong]))
        began_s = time.monotonic()

        async def silent():
            """The surfaces that do not say it yet."""
            said = {
                "ready": str(await faults(router)),
                "workers": str(await reasons(router)),
                "inspect": await inspected(router, capsys),
                "dashboard": await on_the_dashboard(router),
                "log": caplog.text,
            }
            return [name for name, text in said.items() if clause not in text]

        await eventually(lambda: equals(silent(), []), poll_s=0.1)
        assert time.monotonic() - began_s < WITHIN_S
        ready = await router.client.get("/ready")
        assert (ready.status_code == 200, ready.json()["ready"]) == (is_ready, is_ready)
        if not is_ready:
            assert clause in ready.json()["reason"]
        view = await router.view(1)
        assert view["lifecycle"] == ("schedulable" if is_ready else "unschedulable")
        if state is not None:
            await eventually(lambda: equals(trust_state(router), state), timeout_s=WITHIN_S)
            line = f'kv_router_worker_trust{{dp_rank="0",state="{state}",worker_id="1"}}'
            assert await router.metric(line) == 1
        fault = 'kv_router_worker_fault{dp_rank="0",worker_id="1"}'
        assert await router.metric(fault) == 1


async def test_engine_that_starts_its_events_late_becomes_exact():
    engine = OpenAiEngine()
    port = free_port()
    async with engine.running(), watching().running() as router:
        await router.post("/workers", registered(engine, port))

        await eventually(lambda: equals(trust_state(router), "approximate"))
        body = {"model_name": "m", "token_ids": TOKENS, "request_id": "r"}
        assert (await router.post("/select_and_reserve", body)).status_code == 200
        assert await router.overlaps(TOKENS, model_name="m") == {(1, 0): 3}
        with Engine(port) as late:
            await eventually(lambda: late.is_heard)
            late.publish(stored([11, 22], TOKENS[:8]))
            await eventually(lambda: equals(router.overlaps(TOKENS, model_name="m"), {(1, 0): 2}))
            assert await trust_state(router) != "approximate"


async def test_worker_that_comes_up_is_chosen_and_one_without_events_that_ends_is_not():
    engine = OpenAiEngine()
    async with watching().running() as router:
        body = {"worker_id": 1, "model_name": "m", "endpoint": engine.url, "block_size": 4}
        await router.post("/workers", body)

        async def lifecycle():
            return (await router.view(1))["lifecycle"]

        await eventually(lambda: equals(lifecycle(), "unschedulable"))
        async with engine.running():
            await eventually(lambda: equals(lifecycle(), "schedulable"))
            (rank,) = (await router.view(1))["ranks"]
            assert rank["trust"]["state"] == "approximate"


async def test_workers_are_not_asked_if_that_is_off():
    router = DirectRouter()
    async with OpenAiEngine().running() as server, router.running():
        with DirectEngine(1) as engine:
            await router.register(engine, endpoint=server.url, model_name="other")
            await router.until_exact(1)
            assert server.given_keys == set()
