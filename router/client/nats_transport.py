"""Questions over NATS, to any router of a namespace, in msgpack.

A router that dies takes what it was asked with it, and nobody says so: who hears nothing for a
while asks again. A request that waits for room is no such case, for its router says that it does,
in an inbox beside that of the answer.
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

from router.body_errors import BodyTooLargeError
from router.bus_errors import BusUnavailableError
from router.client.bodies import as_list
from router.client.calls import Question
from router.client.errors import UnansweredError
from router.client.refusals import rebuilt
from router.client.settings import Patience
from router.protocol.subjects import Subjects
from router.publisher.bus import Bus, connection
from router.security.nats_access import NatsAccess

T = TypeVar("T")

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/msgpack"


class NatsTransport:
    """To the routers of a namespace, which take turns."""

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
        """Waits until there is a connection; a lost one is made again by itself."""
        async with connection(url, "kv-router client", _note, access) as bus:
            transport = cls(bus, namespace)
            await bus.client.subscribe(f"{transport._waiting_inbox}.*", cb=transport._it_waits)
            yield transport

    async def ask(self, question: Question[T], headers: dict[str, str], patience: Patience) -> T:
        """The answer to one attempt. Raises what the router refuses with, and UnansweredError."""
        answer = await self._requested(_body(question), headers, patience)
        said = answer.headers or {}
        if "Nats-Service-Error-Code" in said:
            status = int(said["Nats-Service-Error-Code"])
            raise rebuilt(msgspec.msgpack.decode(answer.data), status, said.get("Retry-After"))
        try:
            reply: T = msgspec.msgpack.decode(
                answer.data, type=question.call.bus_reply or question.call.reply
            )
        except msgspec.MsgspecError as error:
            raise self._unanswered(error, is_maybe_done=True) from error
        return reply

    async def _requested(self, body: bytes, headers: dict[str, str], patience: Patience) -> Msg:
        """What is sent while the connection is lost would be delivered later, unasked."""
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
        """Raises TimeoutError."""
        async with asyncio.timeout(patience.timeout_s) as timeout:
            self._asking[inbox] = timeout, patience.wait_s
            try:
                yield
            finally:
                del self._asking[inbox]

    async def _it_waits(self, message: Msg) -> None:
        """A router says that what it was asked waits there."""
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
