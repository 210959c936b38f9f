"""Engines asked over HTTP: one bounded answer, or again and again. Whatever is wrong with an answer
is a WireError that says it.
"""

import asyncio
from collections.abc import Awaitable, Callable

import httpx

from router.errors import WireError


def engine_client(timeout_s: float) -> httpx.AsyncClient:
    """A client for one engine: one connection, no proxy of the environment's."""
    limits = httpx.Limits(max_connections=1)
    return httpx.AsyncClient(timeout=timeout_s, limits=limits, trust_env=False)


async def fetch(
    client: httpx.AsyncClient, method: str, url: str, *, limit_bytes: int, timeout_s: float
) -> bytes:
    """The whole body. Raises WireError, also where there is no answer in time."""
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


async def ask_forever(
    ask: Callable[[httpx.AsyncClient], Awaitable[bool]],
    *,
    timeout_s: float,
    interval_s: float,
    max_pause_s: float,
) -> None:
    """Ask until cancelled. `ask` says whether it was answered; the pause doubles while it is not,
    up to a bound. Whoever was not answered asks anew: a client that gave an answer up may count the
    connection as busy for ever, and it has but one.
    """
    pause_s = interval_s
    while True:
        async with engine_client(timeout_s) as client:
            while await ask(client):
                pause_s = interval_s
                await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, max_pause_s)
        await asyncio.sleep(pause_s)
