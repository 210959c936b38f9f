"""HTTP requests to engines: one response of limited size, or polling.

All errors of a response are raised as WireError with the reason.
"""

import asyncio
from collections.abc import Awaitable, Callable

import httpx

from router.errors import WireError


def engine_client(timeout_s: float) -> httpx.AsyncClient:
    """Return a client for one engine: one connection, and no proxy from the environment."""
    limits = httpx.Limits(max_connections=1)
    return httpx.AsyncClient(timeout=timeout_s, limits=limits, trust_env=False)


async def fetch(
    client: httpx.AsyncClient, method: str, url: str, *, limit_bytes: int, timeout_s: float
) -> bytes:
    """Return the whole body. Raises WireError, also if the response does not arrive in time."""
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s), client.stream(method, url) as answer:
            if answer.status_code != httpx.codes.OK:
                raise WireError(f"status {answer.status_code}")
            async for chunk in answer.aiter_bytes():
                body += chunk
                if len(body) > limit_bytes:
                    raise WireError(f"more than {limit_bytes} bytes")
    except (httpx.HTTPError, TimeoutError) as error:
        raise WireError(str(error) or type(error).__name__) from error
    return bytes(body)


async def poll_forever(
    ask: Callable[[httpx.AsyncClient], Awaitable[bool]],
    *,
    timeout_s: float,
    interval_s: float,
    max_pause_s: float,
) -> None:
    """Call `ask` until cancelled. It returns whether it got a response.

    The pause doubles after each failure, up to `max_pause_s`. A failure also discards the
    client: after an abandoned response it may count its only connection as busy forever.
    """
    pause_s = interval_s
    while True:
        async with engine_client(timeout_s) as client:
            while await ask(client):
                pause_s = interval_s
                await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, max_pause_s)
        await asyncio.sleep(pause_s)
