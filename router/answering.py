"""Requests on the bus, answered side by side, in a queue group with the other processes."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from router.metrics import RouterMetrics
from router.publisher.bus import Bus, subscribe

PARALLEL = 8
"""Requests answered at once; more only wait for longer prompts being hashed."""

Later: TypeAlias = Coroutine[Any, Any, bytes]
"""An answer that may be long in coming, and must not keep others from theirs. Whoever gives one
bounds how many there are.
"""


async def answer_requests(
    bus: Bus,
    subject: str,
    queue_group: str,
    reply: Callable[[Msg], Awaitable[bytes | Later]],
    metrics: RouterMetrics,
) -> None:
    """Answer every request on a subject until cancelled."""
    subscription = await subscribe(bus, subject, queue_group)

    async def serve() -> None:
        async for message in subscription.messages:
            answer = await reply(message)
            if isinstance(answer, bytes):
                await _respond(message, answer, metrics)
            else:
                group.create_task(_finish(message, answer, metrics))

    async with asyncio.TaskGroup() as group:
        for _ in range(PARALLEL):
            group.create_task(serve())


async def _finish(message: Msg, later: Later, metrics: RouterMetrics) -> None:
    await _respond(message, await later, metrics)


async def _respond(message: Msg, answer: bytes, metrics: RouterMetrics) -> None:
    if message.reply:
        try:
            await message.respond(answer)
        except NatsError:
            metrics.refusals.labels("nats", "undeliverable").inc()
