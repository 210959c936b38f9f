"""The NATS transport of the client, to any router of a namespace, in msgpack.

A router that dies loses its requests without notice, so a client without a response for `timeout_s`
sends its request again. A request that waits for capacity is different: its router reports that it
waits, on a second inbox beside that of the response.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError, NoRespondersError

from router.client.bodies import as_list
from router.client.calls import Question
from router.client.errors import UnansweredError, rebuilt
from router.client.retry import HeadersOf
from router.client.settings import Patience
from router.protocol.subjects import Subjects
from router.protocol.values import UNREADABLE
from router.runtime.bus.connection import Bus, connection
from router.runtime.bus.errors import BusUnavailableError
from router.runtime.process.errors import BodyTooLargeError
from router.runtime.security.nats_access import NatsAccess

T = TypeVar("T")

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/msgpack"


class NatsTransport:
    """A connection to the routers of a namespace, which take turns."""

    def __init__(self, bus: Bus, namespace: str) -> None:
        self._bus = bus
        self._subject = Subjects(namespace).router
        self._waiting_inbox = bus.client.new_inbox()
        self._asked = 0
        self._asking: dict[str, tuple[asyncio.Timeout, float]] = {}

    @classmethod
    @asynccontextmanager
    async def connected(
        cls, url: str, namespace: str, access: NatsAccess
    ) -> AsyncIterator["NatsTransport"]:
        """Yield a transport once it is connected. A lost connection is restored automatically."""
        async with connection(url, "kv-router client", _note, access) as bus:
            transport = cls(bus, namespace)
            await bus.client.subscribe(f"{transport._waiting_inbox}.*", cb=transport._it_waits)
            yield transport

    async def send(self, question: Question[T], headers: HeadersOf, patience: Patience) -> T:
        """Send one attempt; return the response. Raises the router's errors and UnansweredError."""
        answer = await self._requested(_body(question), headers(question), patience)
        reply_headers = answer.headers or {}
        try:
            if "Nats-Service-Error-Code" in reply_headers:
                status = int(reply_headers["Nats-Service-Error-Code"])
                raise rebuilt(
                    msgspec.msgpack.decode(answer.data), status, reply_headers.get("Retry-After")
                )
            reply: T = msgspec.msgpack.decode(
                answer.data, type=question.call.bus_reply or question.call.reply
            )
        except (*UNREADABLE, ValueError) as error:
            raise self._unanswered(error, is_maybe_done=True) from error
        return reply

    async def _requested(self, body: bytes, headers: dict[str, str], patience: Patience) -> Msg:
        """Send a request and return the raw response.

        Raises an error without a connection: NATS would deliver the message later, unexpectedly.
        """
        client = self._bus.client
        if not client.is_connected:
            raise self._unanswered("no connection", is_maybe_done=False)
        total_s = patience.total_s
        typed = {**headers, "Content-Type": MEDIA_TYPE, "x-timeout-s": f"{total_s:.6g}"}
        self._asked += 1
        inbox = f"{self._waiting_inbox}.{self._asked}"
        if patience.wait_s:
            typed["x-waiting-inbox"] = inbox
        asked = client.request(self._subject, body, timeout=total_s, headers=typed)
        try:
            async with self._patiently(inbox, patience):
                return await self._bus.answered(asked)
        except MaxPayloadError as error:
            raise BodyTooLargeError(client.max_payload) from error
        except NoRespondersError as error:
            raise self._unanswered("no router listens", is_maybe_done=False) from error
        except (NatsError, BusUnavailableError, TimeoutError) as error:
            raise self._unanswered(error, is_maybe_done=True) from error

    @asynccontextmanager
    async def _patiently(self, inbox: str, patience: Patience) -> AsyncIterator[None]:
        """Limit the block to `timeout_s`, extended once the request waits. Raises TimeoutError."""
        async with asyncio.timeout(patience.timeout_s) as timeout:
            self._asking[inbox] = timeout, patience.wait_s
            try:
                yield
            finally:
                del self._asking[inbox]

    async def _it_waits(self, message: Msg) -> None:
        """Extend the timeout of a request that waits, as its router reports."""
        asking = self._asking.get(message.subject)
        if asking is not None and not asking[0].expired():
            timeout, wait_s = asking
            timeout.reschedule(asyncio.get_running_loop().time() + wait_s)

    def _unanswered(self, problem: object, *, is_maybe_done: bool) -> UnansweredError:
        reason = str(problem) or type(problem).__name__
        return UnansweredError(self._subject, reason, is_maybe_done=is_maybe_done)


def _body(question: Question[Any]) -> bytes:
    fields = {"method": question.call.name, **question.fields}
    if question.request_id is not None:
        fields["request_id"] = question.request_id
    return msgspec.msgpack.encode(fields, enc_hook=as_list)


def _note(connected: bool) -> None:
    log.info("connected to NATS" if connected else "lost the connection to NATS")
