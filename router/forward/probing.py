"""Probes of workers that are left alone: who answers may be tried again."""

import asyncio
import time

from router.forward.standing import Standing
from router.http_client import HttpPool, Origin, Request, UpstreamError

EVERY_S = 0.5
PATIENCE_S = 2.0
BODY_LIMIT_BYTES = 65_536
_HEALTH = Request("GET", "/health", is_repeatable=True)


async def probe_forever(standing: Standing, pool: HttpPool) -> None:
    """Until cancelled."""
    while True:
        await asyncio.sleep(EVERY_S)
        for worker_id, endpoint in tuple(standing.to_probe(time.monotonic())):
            lives = await _lives(endpoint, pool)
            standing.probed(worker_id, time.monotonic(), lives=lives)
        standing.forget(time.monotonic())


async def _lives(endpoint: str, pool: HttpPool) -> bool:
    try:
        async with pool.asked(Origin.of(endpoint), _HEALTH, PATIENCE_S) as answer:
            await answer.read(BODY_LIMIT_BYTES, PATIENCE_S)
            return answer.status == 200
    except UpstreamError:
        return False
