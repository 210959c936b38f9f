"""A responder for requests on the bus, in a queue group with the other processes.

  subject ─▶ take ─▶ response, in the same turn of the event loop
               ├──▶ a task for what has to wait, at most `limit` at once ─▶ response
               └──▶ refused at once beyond that: the caller can try another process

A caller cannot distinguish a process that died from one that keeps it waiting. A response that may
take long is therefore announced in the inbox that the request names, if there is one.

Draining accepts no further requests, and finishes those that were accepted.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeAlias

from msgspec import Struct
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from router.errors import KvRouterError
from router.observability.metrics import RouterMetrics
from router.runtime.bus.connection import Bus, is_inbox, subscribe, translated
from router.runtime.security.errors import TooManyRequestsError

log = logging.getLogger(__name__)

LINE_END = b"\r\n"

_INTERNAL = KvRouterError("internal error")


def headers_of(head: bytes) -> dict[str, str]:
    """Return the headers of a message by their names, as they were sent."""
    headers = {}
    for line in head.split(LINE_END)[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            headers[name.strip().decode("latin-1")] = value.strip().decode("utf-8", "replace")
    return headers


def head_of(headers: Mapping[str, str], before: bytes = b"NATS/1.0\r\n\r\n") -> bytes:
    """Return headers as they are sent, after those of another head. No value can end its line."""
    lines = [f"{name}: {_one_line(value)}\r\n" for name, value in headers.items()]
    return b"%b%b\r\n" % (before[:-2], "".join(lines).encode(errors="replace"))


def _one_line(value: str) -> str:
    return value.replace("\r", " ").replace("\n", " ")


class BusResponse(Struct, frozen=True, gc=False):
    """A response, and its headers as they are sent; none are b""."""

    body: bytes
    head: bytes = b""


Work: TypeAlias = Coroutine[Any, Any, "BusResponse | Waiting"]
"""A response that has to wait for something; such responses count toward the limit."""


class Waiting(Struct, frozen=True, gc=False):
    """A response that may take long. `inbox`: where it is announced; may be empty.

    It does not count toward the limit of concurrent requests: the function that returns it bounds
    the number of such responses.
    """

    inbox: bytes
    response: Coroutine[Any, Any, BusResponse]


Answer: TypeAlias = Callable[[bytes, bytes], BusResponse | Waiting | Work]
Refuse: TypeAlias = Callable[[bytes, KvRouterError], BusResponse]


class Responder:
    """A responder for one subject.

    `answer`: responds to the head and the body of a request. `refuse`: encodes a refusal of a
    request with this head, also of what `answer` raises.
    """

    def __init__(
        self,
        subject: str,
        queue_group: str,
        answer: Answer,
        refuse: Refuse,
        metrics: RouterMetrics,
        limit: int,
    ) -> None:
        self._subject = subject
        self._queue_group = queue_group
        self._answer = answer
        self._refuse = refuse
        self._metrics = metrics
        self._limit = limit
        metrics.bus_requests_max.labels(queue_group).set(limit)
        self._in_progress = metrics.bus_requests.labels(queue_group)
        self._at_once = 0
        self._begun: set[asyncio.Task[None]] = set()
        self._bus: Bus | None = None
        self._subscription: Subscription | None = None
        self._drained = asyncio.Event()

    async def run(self, bus: Bus, listening: Callable[[], None] = lambda: None) -> None:
        """Respond until cancelled or drained; call `listening` once the subscription is active."""
        self._bus = bus
        try:
            with bus.client.taking(self._take):
                self._subscription = await subscribe(bus, self._subject, self._queue_group)
                async with translated(self._subject):
                    await bus.client.flush()
                listening()
                await self._drained.wait()
        finally:
            await self._cancel_begun()

    async def drain(self) -> None:
        """Accept no more requests, and wait for those accepted. Raises BusUnavailableError."""
        if self._subscription is None:
            return
        async with translated(self._subject):
            await self._subscription.drain()  # type: ignore[no-untyped-call]
        if self._begun:
            await asyncio.wait(self._begun)
        self._drained.set()

    def _take(self, _: bytes, reply: bytes, head: bytes, body: bytes) -> None:
        """Respond to a request, or begin a task that will."""
        answer: BusResponse | Waiting | Work
        try:
            if self._at_once >= self._limit:
                answer = self._refuse(head, TooManyRequestsError(self._limit))
            else:
                answer = self._answer(head, body)
        except Exception as error:  # noqa: BLE001 - a bug; other requests continue
            answer = self._failed(head, error)
        if isinstance(answer, BusResponse):
            self._respond(reply, answer)
            return
        if isinstance(answer, Waiting):
            later = self._wait(reply, head, answer)
        else:
            self._note(1)
            later = self._work(reply, head, answer)
        task = asyncio.get_running_loop().create_task(later)
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)

    async def _work(self, reply: bytes, head: bytes, work: Work) -> None:
        try:
            answer = await work
        except Exception as error:  # noqa: BLE001 - a bug; other requests continue
            answer = self._failed(head, error)
        finally:
            self._note(-1)
        if isinstance(answer, Waiting):
            await self._wait(reply, head, answer)
        else:
            self._respond(reply, answer)

    async def _wait(self, reply: bytes, head: bytes, waiting: Waiting) -> None:
        self._respond(waiting.inbox, BusResponse(b""))
        try:
            answer = await waiting.response
        except Exception as error:  # noqa: BLE001 - a bug; other requests continue
            answer = self._failed(head, error)
        self._respond(reply, answer)

    def _failed(self, head: bytes, error: Exception) -> BusResponse:
        log.error("request failed: internal error", exc_info=error)
        return self._refuse(head, _INTERNAL)

    def _respond(self, reply: bytes, answer: BusResponse) -> None:
        if self._bus is not None and is_inbox(reply):
            try:
                self._bus.client.send(reply, answer.head, answer.body)
            except NatsError:
                self._metrics.refusals.labels("nats", "undeliverable").inc()

    def _note(self, change: int) -> None:
        self._at_once += change
        self._in_progress.set(self._at_once)

    async def _cancel_begun(self) -> None:
        for task in self._begun:
            task.cancel()
        if self._begun:
            await asyncio.wait(self._begun)
