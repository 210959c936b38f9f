"""Clients for the tier status of a running agent: over HTTP, or over NATS."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import httpx
import msgspec
from nats.errors import Error as NatsError

from router.errors import ServerError
from router.protocol.subjects import Subjects
from router.protocol.values import UNREADABLE
from router.runtime.bus.connection import connection
from router.runtime.bus.errors import BusUnavailableError
from router.runtime.security.http_access import HttpAccess
from worker_agent.operations.messages import StatusQuery, StatusReply

Ask: TypeAlias = Callable[[], Awaitable[StatusReply]]

TIMEOUT_S = 10.0
_ERROR = "Nats-Service-Error"


@asynccontextmanager
async def over_http(url: str, access: HttpAccess) -> AsyncIterator[Ask]:
    """Yield a client of the agent at a URL, which raises ServerError. Raises ConfigError."""
    address = f"{url.rstrip('/')}/tiers"

    async def query() -> StatusReply:
        try:
            answer = await client.get(address)
        except httpx.HTTPError as error:
            raise ServerError(address, str(error) or type(error).__name__) from error
        if answer.status_code != 200:
            raise ServerError(address, f"status {answer.status_code}: {answer.text[:500]}")
        return _decoded(address, answer.content)

    options = access.options("client", url)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, **options) as client:
        yield query


@asynccontextmanager
async def over_nats(
    url: str, subjects: Subjects, worker_id: int, access: HttpAccess
) -> AsyncIterator[Ask]:
    """Yield a client of a worker on the bus, which raises ServerError.

    Raises ConfigError, and ServerError if the bus is unavailable.
    """
    subject = subjects.tiers(worker_id)
    headers = access.headers("client") or None
    question = msgspec.json.encode(StatusQuery())

    async def query() -> StatusReply:
        try:
            answer = await bus.client.request(subject, question, timeout=TIMEOUT_S, headers=headers)
        except (NatsError, TimeoutError) as error:
            raise ServerError(subject, f"no response: {error}") from error
        if answer.headers and _ERROR in answer.headers:
            raise ServerError(subject, answer.headers[_ERROR])
        return _decoded(subject, answer.data)

    try:
        async with asyncio.timeout(TIMEOUT_S) as connecting:
            async with connection(url, "kv-worker-agent tiers", lambda _: None) as bus:
                connecting.reschedule(None)
                yield query
    except (TimeoutError, BusUnavailableError) as error:
        raise ServerError(url, f"bus unavailable: {error}") from error


def _decoded(place: str, body: bytes) -> StatusReply:
    try:
        return msgspec.json.decode(body, type=StatusReply)
    except UNREADABLE as error:
        raise ServerError(place, f"not a response of an agent: {error}") from error
