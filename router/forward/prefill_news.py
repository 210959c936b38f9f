"""What several processes that forward know together of workers of role prefill: `kv.{ns}.prefill`.

    computed ─▶ the others know that there is a pool
    failed   ─▶ counts against that worker with the others, too

That a prompt was computed for another does not count in a worker's favour: who cannot reach it
himself should find that out. Loads need no such news, for prompts are booked like anything else.
"""

import asyncio
import logging
import time
from random import getrandbits

from router.bus_errors import BusError
from router.errors import WireError
from router.forward.pools import PrefillPools
from router.forward.prefill_metrics import PrefillMetrics
from router.forward.standing import Standing
from router.protocol.prefills import PrefillEvent, decode_prefill_event, encode_prefill_event
from router.protocol.subjects import Subjects
from router.publisher.bus import Bus, connection, subscribe, translated
from router.security.nats_access import NatsAccess

log = logging.getLogger(__name__)

MOST_WAITING = 1024
"""Events that nobody has taken yet; beyond, the newest is dropped."""
PAUSE_S = 1.0


class PrefillNews:
    """This process among the others. `tell` never waits."""

    def __init__(
        self,
        url: str,
        namespace: str,
        access: NatsAccess,
        pools: PrefillPools,
        standing: Standing,
        metrics: PrefillMetrics,
    ) -> None:
        self.forwarder_id = getrandbits(62)
        self._url = url
        self._subject = Subjects(namespace).prefills
        self._access = access
        self._pools = pools
        self._standing = standing
        self._metrics = metrics
        self._waiting: asyncio.Queue[PrefillEvent] = asyncio.Queue(MOST_WAITING)

    def tell(self, event: PrefillEvent) -> None:
        """Have the others told, once there is a bus."""
        try:
            self._waiting.put_nowait(event)
        except asyncio.QueueFull:
            self._metrics.news.labels("dropped").inc()

    def take(self, payload: bytes) -> None:
        """Take in what another says, or drop and count it."""
        try:
            event = decode_prefill_event(payload)
        except WireError as error:
            self._metrics.news.labels("unreadable").inc()
            log.debug("news of prompts are unreadable and dropped: %s", error)
            return
        if event.forwarder_id == self.forwarder_id:
            return
        self._metrics.news.labels("heard").inc()
        if event.outcome == "computed":
            self._pools.found(event.model_name)
        else:
            self._standing.failed(event.worker_id, event.endpoint, time.monotonic())

    async def run(self) -> None:
        """Tell and hear, until cancelled."""
        at = connection(self._url, "kv-router forward", _note, self._access)
        async with at as bus, asyncio.TaskGroup() as group:
            group.create_task(self._hear(bus))
            group.create_task(self._tell(bus))

    async def _hear(self, bus: Bus) -> None:
        while True:
            try:
                async for message in (await subscribe(bus, self._subject)).messages:
                    self.take(message.data)
            except BusError as error:
                log.debug("cannot listen on %s: %s", self._subject, error)
            await asyncio.sleep(PAUSE_S)

    async def _tell(self, bus: Bus) -> None:
        while True:
            event = await self._waiting.get()
            try:
                async with translated(self._subject):
                    await bus.client.publish(self._subject, encode_prefill_event(event))
            except BusError:
                self._metrics.news.labels("lost").inc()
            else:
                self._metrics.news.labels("told").inc()


def _note(is_connected: bool) -> None:
    log.info("bus of news of prompts: %s", "connected" if is_connected else "connection lost")
