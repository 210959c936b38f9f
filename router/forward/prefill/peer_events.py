"""Prefill events exchanged between forwarders over the bus: `kv.{ns}.prefill`.

    computed ─▶ other forwarders learn that a prefill worker exists
    failed   ─▶ counts against the worker in the other forwarders' circuit breakers, too

A success does not count in a worker's favour: another forwarder may be unable to reach it. Loads
need no such events, because prefills are booked like other requests.
"""

import asyncio
import logging
import time
from random import getrandbits

from router.errors import WireError
from router.forward.metrics import ForwardMetrics
from router.forward.prefill.pools import PrefillPools
from router.forward.resilience.circuit_breaker import CircuitBreaker
from router.protocol.prefills import PrefillEvent, decode_prefill_event, encode_prefill_event
from router.protocol.subjects import Subjects
from router.runtime.bus.connection import Bus, connection, subscribe, translated
from router.runtime.bus.errors import BusError
from router.runtime.security.nats_access import NatsAccess

log = logging.getLogger(__name__)

MOST_WAITING = 1024
"""Limit of unpublished events; beyond it, the newest is dropped."""
PAUSE_S = 1.0


class PrefillEvents:
    """Publishes and receives prefill events. `publish` never waits."""

    def __init__(
        self,
        url: str,
        namespace: str,
        access: NatsAccess,
        pools: PrefillPools,
        breaker: CircuitBreaker,
        metrics: ForwardMetrics,
    ) -> None:
        self.forwarder_id = getrandbits(62)
        self._url = url
        self._subject = Subjects(namespace).prefills
        self._access = access
        self._pools = pools
        self._breaker = breaker
        self._metrics = metrics
        self._waiting: asyncio.Queue[PrefillEvent] = asyncio.Queue(MOST_WAITING)

    def publish(self, event: PrefillEvent) -> None:
        """Queue an event for publication on the bus."""
        try:
            self._waiting.put_nowait(event)
        except asyncio.QueueFull:
            self._metrics.prefill_news.labels("dropped").inc()

    def take(self, payload: bytes) -> None:
        """Apply another forwarder's event; an unreadable one is dropped and counted."""
        try:
            event = decode_prefill_event(payload)
        except WireError as error:
            self._metrics.prefill_news.labels("unreadable").inc()
            log.debug("dropped an unreadable prefill event: %s", error)
            return
        if event.forwarder_id == self.forwarder_id:
            return
        self._metrics.prefill_news.labels("heard").inc()
        if event.outcome == "computed":
            self._pools.found(event.model_name)
        else:
            self._breaker.failed(event.worker_id, event.endpoint, time.monotonic())

    async def run(self) -> None:
        """Publish and receive events, until cancelled."""
        at = connection(self._url, "kv-router forward", _note, self._access)
        async with at as bus, asyncio.TaskGroup() as group:
            group.create_task(self._receive(bus))
            group.create_task(self._publish_forever(bus))

    async def _receive(self, bus: Bus) -> None:
        while True:
            try:
                async for message in (await subscribe(bus, self._subject)).messages:
                    self.take(message.data)
            except BusError as error:
                log.debug("cannot subscribe to %s: %s", self._subject, error)
            await asyncio.sleep(PAUSE_S)

    async def _publish_forever(self, bus: Bus) -> None:
        while True:
            event = await self._waiting.get()
            try:
                async with translated(self._subject):
                    await bus.client.publish(self._subject, encode_prefill_event(event))
            except BusError:
                self._metrics.prefill_news.labels("lost").inc()
            else:
                self._metrics.prefill_news.labels("told").inc()


def _note(is_connected: bool) -> None:
    log.info("bus of prefill events: %s", "connected" if is_connected else "connection lost")
