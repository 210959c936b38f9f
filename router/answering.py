"""Requests on the bus, answered side by side, in a queue group with the other processes.

    subject ─▶ take ─▶ a task each, at most `limit` at once ─▶ answer
                  └──▶ refused at once beyond that: it can ask another process

Whoever asks cannot tell a process that died from one that lets it wait: so an answer that is long
in coming is announced in the inbox that the header `x-waiting-inbox` names, if it names one.

Draining takes no more, and finishes what was begun.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from msgspec import Struct
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from router.errors import KvRouterError
from router.metrics import RouterMetrics
from router.publisher.bus import Bus, is_inbox, subscribe, translated
from router.security.errors import TooManyRequestsError

WAITING_INBOX = "x-waiting-inbox"


class BusAnswer(Struct, frozen=True):
    """An answer, and its headers."""

    body: bytes
    headers: dict[str, str] | None = None


Later: TypeAlias = Awaitable[BusAnswer]
"""An answer that may be long in coming. It is not counted among those at once: whoever gives one
bounds how many there are.
"""

Answer: TypeAlias = Callable[[Msg], Awaitable[BusAnswer | Later]]
Refuse: TypeAlias = Callable[[Msg, KvRouterError], BusAnswer]


class Answering:
    """Answers the requests of one subject. `answer` raises nothing; `refuse` says why not."""

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
        metrics.bus.requests_max.labels(queue_group).set(limit)
        self._at_once = 0
        self._begun: set[asyncio.Task[None]] = set()
        self._subscription: Subscription | None = None

    async def run(self, bus: Bus, listening: Callable[[], None] = lambda: None) -> None:
        """Answer until cancelled, or drained; `listening` is called once the server knows of us."""
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
        """Take no more, and wait until what was taken is answered. Raises BusUnavailableError."""
        if self._subscription is None:
            return
        async with translated(self._subject):
            await self._subscription.drain()  # type: ignore[no-untyped-call]
        if self._begun:
            await asyncio.wait(self._begun)

    async def _answered(self, bus: Bus, message: Msg) -> None:
        reply, waiting_inbox = message.reply, (message.headers or {}).get(WAITING_INBOX, "")
        try:
            answer = await self._answer(message)
        finally:
            self._note(-1)
        del message  # with all its tokens, which may be many in a long queue
        if not isinstance(answer, BusAnswer):
            await self._respond(bus, waiting_inbox, BusAnswer(b""))
            answer = await answer
        await self._respond(bus, reply, answer)

    async def _respond(self, bus: Bus, reply: str, answer: BusAnswer) -> None:
        if is_inbox(reply):
            try:
                await bus.client.publish(reply, answer.body, headers=answer.headers)
            except NatsError:
                self._metrics.refusals.labels("nats", "undeliverable").inc()

    def _note(self, change: int) -> None:
        self._at_once += change
        self._metrics.bus.requests.labels(self._queue_group).set(self._at_once)
