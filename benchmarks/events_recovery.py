"""How soon the event plane is right again after a fault of the bus.

A router process and one agent, whole. `restart`: nats-server is killed and started again with its
store; from its start until the router shows the first event that was published afterwards. `wiped`:
the event stream is deleted and made anew while the agent has nothing to say; until the router no
longer says `exact`, and until it does again. There is nothing to run beside it: the goal is shown.
"""

import asyncio
import time
from collections.abc import Callable
from statistics import median

from events_agent import WORKER_ID, Agent, living_agent
from events_processes import Server, running_server
from events_router import RouterProcess, running_router
from events_scale import EventScale
from rows import Row
from timing import Bounded

from router.runtime.bus.connection import StreamLimits, ensure_event_stream

NAMESPACE = "recovery"
GOAL_FLOW_S = GOAL_NOTICED_S = 2.0
GOAL_HEALED_S = 5.0
"""Ours: a second of silence, another for the log to heal itself, then a checkpoint is asked for."""

POLL_S = 0.005
PATIENCE_S = 30.0


def recovery_rows(scale: EventScale) -> list[Row]:
    """Seconds after each fault."""
    with running_server() as server, running_router(server.url, NAMESPACE) as router:
        flows_s, noticed_s, healed_s = asyncio.run(_times_s(server, router, scale))
    return [
        _row("events flow again", flows_s, GOAL_FLOW_S),
        _row("wiped: noticed", noticed_s, GOAL_NOTICED_S),
        _row("wiped: exact again", healed_s, GOAL_HEALED_S),
    ]


def _row(name: str, times_s: list[float], goal_s: float) -> Row:
    return Bounded(name, median(times_s), goal_s, "s", goal_s, lower=True)


async def _times_s(
    server: Server, router: RouterProcess, scale: EventScale
) -> tuple[list[float], list[float], list[float]]:
    flows_s, wiped_s = [], []
    async with living_agent(server.url, NAMESPACE) as agent:
        await _until(lambda: router.is_exact(WORKER_ID))
        for _ in range(scale.rounds):
            flows_s.append(await _restarted_s(server, router, agent, scale.down_s))
            await _until(lambda: router.is_exact(WORKER_ID))
            wiped_s.append(await _wiped_s(router, agent))
    return flows_s, [noticed_s for noticed_s, _ in wiped_s], [healed_s for _, healed_s in wiped_s]


async def _restarted_s(server: Server, router: RouterProcess, agent: Agent, down_s: float) -> float:
    """Seconds from the server's start; the agent stores blocks all the time."""
    storing = asyncio.create_task(agent.store_forever())
    await asyncio.sleep(down_s)
    server.kill()
    await asyncio.sleep(down_s)
    published = agent.published_event_id
    start_s = time.monotonic()
    await asyncio.to_thread(server.start)
    await _until(lambda: agent.published_event_id > published)
    wanted = agent.published_event_id
    await _until(lambda: router.shows(WORKER_ID, wanted))
    seconds = time.monotonic() - start_s
    storing.cancel()
    return seconds


async def _wiped_s(router: RouterProcess, agent: Agent) -> tuple[float, float]:
    """Seconds until noticed, and until right again."""
    start_s = time.monotonic()
    await agent.bus.js.delete_stream(agent.subjects.event_stream)
    await ensure_event_stream(agent.bus.js, agent.subjects, StreamLimits())
    await _until(lambda: not router.is_exact(WORKER_ID))
    noticed_s = time.monotonic() - start_s
    await _until(lambda: router.is_exact(WORKER_ID))
    return noticed_s, time.monotonic() - start_s


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(POLL_S)
