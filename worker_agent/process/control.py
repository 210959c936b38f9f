"""Requests that routers and agents with the same id send to an agent over the bus."""

import asyncio
import time
from collections.abc import Collection, Mapping
from contextlib import suppress

from nats.aio.subscription import Subscription
from nats.errors import NoRespondersError

from router.errors import WireError
from router.protocol.catalogue import worker_key
from router.protocol.loads import decode_beacon
from router.protocol.subjects import Subjects
from router.protocol.values import Rank
from router.publisher.event_publisher import KvEventPublisher, flush_window_s
from router.publisher.load_publisher import ReceivedBeacons
from router.runtime.bus.connection import Bus, count_keys, is_inbox, subscribe, translated
from router.runtime.bus.errors import BusUnavailableError, TwinError

PING_TIMEOUT_S = 2.0
FLEET_SIZE_INTERVAL_S = 10.0
CHECKPOINT_INTERVAL_S = 0.5
"""The minimum interval of checkpoints; earlier requests are ignored."""


async def refuse_twin(bus: Bus, subjects: Subjects, worker_id: int) -> None:
    """Raise TwinError if an agent with this worker id is running.

    The bus reports at once if there is no listener; a listener without a response is alive as well.
    Raises BusUnavailableError, also if the connection is lost before the response.
    """
    subject = subjects.ping(worker_id)
    async with translated(subject):
        try:
            ping = bus.client.request(subject, timeout=PING_TIMEOUT_S)
            answer = await bus.answered(ping)
            detail = f"incarnation {answer.data.decode(errors='replace')} responds"
        except NoRespondersError:
            return
        except TimeoutError:
            detail = f"its agent is connected, but did not respond within {PING_TIMEOUT_S} s"
    raise TwinError(worker_key(worker_id), detail)


async def listen_for_pings(bus: Bus, subjects: Subjects, worker_id: int) -> Subscription:
    """Subscribe to pings; `answer_pings` responds to them."""
    subscription = await subscribe(bus, subjects.ping(worker_id))
    async with translated(subscription.subject):
        await bus.client.flush()
    return subscription


async def answer_pings(subscription: Subscription, incarnation: int) -> None:
    """Respond to pings, until cancelled."""
    async for message in subscription.messages:
        if is_inbox(message.reply):
            async with translated(message.subject):
                await message.respond(str(incarnation).encode())


async def listen_for_beacons(bus: Bus, subjects: Subjects, beacons: ReceivedBeacons) -> None:
    """Record the beacons of routers, until cancelled."""
    subscription = await subscribe(bus, subjects.beacons)
    async for message in subscription.messages:
        with suppress(WireError):
            beacons.record(decode_beacon(message.data), time.monotonic())


async def follow_fleet_size(
    bus: Bus, subjects: Subjects, publishers: Collection[KvEventPublisher]
) -> None:
    """Increase the flush interval of events with the fleet size, until cancelled."""
    while True:
        with suppress(BusUnavailableError):
            workers = await count_keys(bus.js, subjects, worker_key("*"))
            for publisher in publishers:
                publisher.flush_interval_s = flush_window_s(workers)
        await asyncio.sleep(FLEET_SIZE_INTERVAL_S)


async def answer_checkpoint_requests(
    bus: Bus, subjects: Subjects, publishers: Mapping[Rank, KvEventPublisher]
) -> None:
    """Write a checkpoint of a rank when a router requests it, until cancelled."""
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
