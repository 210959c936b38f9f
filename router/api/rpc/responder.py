"""A responder for requests on the bus, in a queue group with the other processes.

  subject ─▶ take ─▶ a task for each, at most `limit` at once ─▶ response
                └──▶ refused at once beyond that: the caller can try another process

A caller cannot distinguish a process that died from one that keeps it waiting. A response that may
take long is therefore announced in the inbox that the header `x-waiting-inbox` names, if there is
one.

Draining accepts no further requests, and finishes those that were accepted.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeAlias

from msgspec import Struct
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from router.errors import KvRouterError
from router.observability.metrics import RouterMetrics
from router.runtime.bus.connection import Bus, is_inbox, subscribe, translated
from router.runtime.security.errors import TooManyRequestsError

log = logging.getLogger(__name__)

_INTERNAL = KvRouterError("internal error")

WAITING_INBOX = "x-waiting-inbox"


class BusResponse(Struct, frozen=True):
    """A response, and its headers."""

    body: bytes
    headers: dict[str, str] | None = None


Later: TypeAlias = Awaitable[BusResponse]
"""A response that may take long.

It does not count toward the limit of concurrent requests: the function that returns it bounds the
number of such responses.
"""

Answer: TypeAlias = Callable[[Msg], Awaitable[BusResponse | Later]]
Refuse: TypeAlias = Callable[[Msg, KvRouterError], BusResponse]


class Responder:
    """A responder for one subject. `refuse` encodes a refusal, also of what `answer` raises."""

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
        self._at_once = 0
        self._begun: set[asyncio.Task[None]] = set()
        self._subscription: Subscription | None = None

    async def run(self, bus: Bus, listening: Callable[[], None] = lambda: None) -> None:
        """Respond until cancelled or drained; call `listening` once the subscription is active."""
        self._subscription = await subscribe(bus, self._subject, self._queue_group)
        async with translated(self._subject):
            await bus.client.flush()
        listening()
        async with asyncio.TaskGroup() as group:
            async for message in self._subscription.messages:
                if self._at_once >= self._limit:
                    refused = self._refuse(message, TooManyRequestsError(self._limit))
                    await self._respond(bus, message.reply, refused)
                    continue
                self._note(1)
                task = group.create_task(self._answered(bus, message))
                self._begun.add(task)
                task.add_done_callback(self._begun.discard)

    async def drain(self) -> None:
        """Accept no more requests, and wait for those accepted. Raises BusUnavailableError."""
        if self._subscription is None:
            return
        async with translated(self._subject):
            await self._subscription.drain()  # type: ignore[no-untyped-call]
        if self._begun:
            await asyncio.wait(self._begun)

    async def _answered(self, bus: Bus, message: Msg) -> None:
        reply, waiting_inbox = message.reply, (message.headers or {}).get(WAITING_INBOX, "")
        head = replace(message, data=b"")
        try:
            answer = await self._answer(message)
        except Exception:  # a bug; other requests continue
            log.exception("request failed: internal error")
            answer = self._refuse(head, _INTERNAL)
        finally:
            self._note(-1)
        del message  # Frees its tokens, which are large in a long queue.
        if not isinstance(answer, BusResponse):
            await self._respond(bus, waiting_inbox, BusResponse(b""))
            try:
                answer = await answer
            except Exception:  # a bug; other requests continue
                log.exception("request failed: internal error")
                answer = self._refuse(head, _INTERNAL)
        await self._respond(bus, reply, answer)

    async def _respond(self, bus: Bus, reply: str, answer: BusResponse) -> None:
        if is_inbox(reply):
            try:
                await bus.client.publish(reply, answer.body, headers=answer.headers)
            except NatsError:
                self._metrics.refusals.labels("nats", "undeliverable").inc()

    def _note(self, change: int) -> None:
        self._at_once += change
        self._metrics.bus_requests.labels(self._queue_group).set(self._at_once)
