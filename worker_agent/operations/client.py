"""Asks a running agent how its tiers are: over HTTP, or over NATS."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import httpx
import msgspec
from nats.errors import Error as NatsError

from router.bus_errors import BusUnavailableError
from router.errors import ServerError
from router.protocol.subjects import Subjects
from router.publisher.bus import connection
from router.security.http_access import HttpAccess
from worker_agent.operations.messages import StatusQuery, StatusReply

Ask: TypeAlias = Callable[[], Awaitable[StatusReply]]

TIMEOUT_S = 10.0
_ERROR = "Nats-Service-Error"


@asynccontextmanager
async def over_http(url: str, access: HttpAccess) -> AsyncIterator[Ask]:
    """The agent at a URL. Raises ConfigError; what it gives raises ServerError."""
    address = f"{url.rstrip('/')}/tiers"

    async def ask() -> StatusReply:
        try:
            answer = await client.get(address)
        except httpx.HTTPError as error:
            raise ServerError(address, str(error) or type(error).__name__) from error
        if answer.status_code != 200:
            raise ServerError(address, f"status {answer.status_code}: {answer.text[:500]}")
        return _decoded(address, answer.content)

    options = access.options("client")
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, **options) as client:
        yield ask


@asynccontextmanager
async def over_nats(
    url: str, subjects: Subjects, worker_id: int, access: HttpAccess
) -> AsyncIterator[Ask]:
    """A worker on the bus. Raises ConfigError, and ServerError where there is no bus; what it gives
    raises ServerError.
    """
    subject = subjects.tiers(worker_id)
    headers = access.options("client").get("headers")
    question = msgspec.json.encode(StatusQuery())

    async def ask() -> StatusReply:
        try:
            answer = await bus.client.request(subject, question, timeout=TIMEOUT_S, headers=headers)
        except (NatsError, TimeoutError) as error:
            raise ServerError(subject, f"no answer: {error}") from error
        if answer.headers and _ERROR in answer.headers:
            raise ServerError(subject, answer.headers[_ERROR])
        return _decoded(subject, answer.data)

    try:
        async with asyncio.timeout(TIMEOUT_S) as connecting:
            async with connection(url, "kv-worker-agent tiers", lambda _: None) as bus:
                connecting.reschedule(None)
                yield ask
    except (TimeoutError, BusUnavailableError) as error:
        raise ServerError(url, f"no bus there: {error}") from error


def _decoded(place: str, body: bytes) -> StatusReply:
    try:
        return msgspec.json.decode(body, type=StatusReply)
    except msgspec.DecodeError as error:
        raise ServerError(place, f"not what an agent answers: {error}") from error
