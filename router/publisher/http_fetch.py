"""One bounded HTTP answer of an engine; whatever is wrong is a WireError that says it."""

import asyncio

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
