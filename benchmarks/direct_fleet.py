"""Many engines registered at once, each with real sockets, and then idle.

The engines are in one other process: a PUB and a ROUTER socket each, and a history that they replay
on request. Time runs from the first `POST /workers` until every rank was seen `exact`:
connected, its history replayed, named and in the index, and proven within the last second. There is
no plain alternative: beside our figures stand their goals. To scrape the router costs it time for
each rank, so it is rarely done; `idle` is measured without it.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

from direct_engines import running_engines
from direct_router import DirectRouter
from direct_scale import DirectScale
from events_engine import BATCH_BLOCKS, BLOCK_SIZE
from rows import Row
from timing import Bounded

CALLERS = 16
POLL_S_PER_ENGINE = 0.0015
PATIENCE_S = 120.0
LOOKS = 5
GOAL_S_PER_ENGINE = 0.02
GOAL_IDLE_CORES = 0.5
GOAL_EXACT = 0.95


def fleet_rows(router: DirectRouter, scale: DirectScale) -> list[Row]:
    """Until all are exact, and what they cost from then on."""
    engines = scale.engines
    with running_engines(engines, scale.history_batches) as endpoints:
        start_s = time.monotonic()
        processor_s = router.processor_s
        with ThreadPoolExecutor(CALLERS) as callers:
            jobs = [
                callers.submit(router.register, worker_id, events, replay, BLOCK_SIZE)
                for worker_id, (events, replay) in enumerate(endpoints, 1)
            ]
            for job in jobs:
                job.result()
        _until_exact(router, engines)
        settled_s = time.monotonic() - start_s
        processor_s = router.processor_s - processor_s
        held = router.total("kv_router_worker_held_blocks")
        if held != engines * scale.history_batches * BATCH_BLOCKS:
            raise RuntimeError(f"the index holds {held:,.0f} blocks")
        cores, exact = _idle(router, engines, scale.idle_s)
        for worker_id in range(1, engines + 1):
            router.remove(worker_id)
    goal_s = GOAL_S_PER_ENGINE * engines
    return [
        Bounded("registered to exact", settled_s, goal_s, "s", goal_s, lower=True),
        Bounded("registered, busy", processor_s, goal_s, "s", goal_s, lower=True),
        Bounded("idle", cores, GOAL_IDLE_CORES, "cores", GOAL_IDLE_CORES, lower=True),
        Bounded("exact while idle", exact, 1.0, "of all", GOAL_EXACT, lower=False),
    ]


def _until_exact(router: DirectRouter, engines: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    seen = _exact(router)
    while len(seen) < engines:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"only {len(seen)} of {engines} ranks were exact")
        time.sleep(POLL_S_PER_ENGINE * engines)
        seen |= _exact(router)


def _exact(router: DirectRouter) -> set[str]:
    return set(router.samples("kv_router_worker_trust", state="exact"))


def _idle(router: DirectRouter, engines: int, idle_s: float) -> tuple[float, float]:
    """Return cores used by an idle fleet without callers, and the part of its exact ranks."""
    start_s, processor_s = time.monotonic(), router.processor_s
    time.sleep(idle_s)
    cores = (router.processor_s - processor_s) / (time.monotonic() - start_s)
    exact = []
    for _ in range(LOOKS):
        time.sleep(POLL_S_PER_ENGINE * engines)
        exact.append(len(_exact(router)) / engines)
    return cores, median(exact)
