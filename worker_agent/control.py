"""What routers and would-be twins ask of an agent over the bus."""

import asyncio
from collections.abc import Mapping

from nats.aio.subscription import Subscription
from nats.errors import NoRespondersError

from router.errors import TwinError
from router.protocol.catalogue import worker_key
from router.protocol.subjects import Subjects
from router.protocol.values import Rank
from router.publisher.bus import Bus, subscribe, translated
from router.publisher.events import KvEventPublisher

PING_TIMEOUT_S = 2.0
CHECKPOINT_INTERVAL_S = 0.5
"""Requests for a checkpoint that come sooner after the last are passed over."""


async def refuse_twin(bus: Bus, subjects: Subjects, worker_id: int) -> None:
    """Make sure that nobody lives under this worker id. Raises TwinError, BusUnavailableError.

    The bus knows at once when nobody listens; who listens but does not answer is not dead either.
    """
    subject = subjects.ping(worker_id)
    async with translated(subject):
        try:
            answer = await bus.client.request(subject, timeout=PING_TIMEOUT_S)
            detail = f"incarnation {answer.data.decode(errors='replace')} answers"
        except NoRespondersError:
            return
        except TimeoutError:
            detail = f"its agent is connected, but did not answer within {PING_TIMEOUT_S} s"
    raise TwinError(worker_key(worker_id), detail)


async def listen_for_pings(bus: Bus, subjects: Subjects, worker_id: int) -> Subscription:
    """From now on pings reach us; `answer_pings` answers them."""
    subscription = await subscribe(bus, subjects.ping(worker_id))
    async with translated(subscription.subject):
        await bus.client.flush()
    return subscription


async def answer_pings(subscription: Subscription, incarnation: int) -> None:
    """Say that we live, until cancelled."""
    async for message in subscription.messages:
        if message.reply:
            async with translated(message.subject):
                await message.respond(str(incarnation).encode())


async def answer_checkpoint_requests(
    bus: Bus, subjects: Subjects, publishers: Mapping[Rank, KvEventPublisher]
) -> None:
    """Write a checkpoint of a rank when a router asks, until cancelled."""
    async with asyncio.TaskGroup() as group:
        for rank, publisher in publishers.items():
            subscription = await subscribe(bus, subjects.checkpoint_wanted(rank))
            group.create_task(_answer(subscription, publisher))


async def _answer(subscription: Subscription, publisher: KvEventPublisher) -> None:
    clock = asyncio.get_running_loop().time
    last_s = float("-inf")
    async for _ in subscription.messages:
        if clock() - last_s >= CHECKPOINT_INTERVAL_S:
            last_s = clock()
            publisher.require_checkpoint()
