"""A router among the routers of its namespace.

It announces itself at once, and answers callers on the bus once it knows the workers: a router that
has just started would refuse requests that the other routers can place.
"""

import asyncio
import logging
import time

from router.bus_errors import TwinError
from router.config import RouterConfig
from router.core import RouterCore
from router.protocol.catalogue import RouterAnnouncement, encode_entry, router_key
from router.protocol.subjects import Subjects
from router.publisher.announcer import Announcer
from router.publisher.bus import Bus
from router.status import ServiceStatus

log = logging.getLogger(__name__)

ANSWERS_AFTER_S = 5.0
"""Of a life on the bus, at the latest: what is wrong then has to be said by somebody."""

HEARS_ALL_S = 1.0
"""Once some worker can be chosen, the others are waited for so long at most."""

_POLL_S = 0.05


class Presence:
    """Announces a router for as long as it is on the bus, until `leave`."""

    def __init__(self, config: RouterConfig, incarnation: int, subjects: Subjects) -> None:
        self._config = config
        self._incarnation = incarnation
        self._subjects = subjects
        self._announcer: Announcer | None = None
        self._is_leaving = asyncio.Event()

    @property
    def is_leaving(self) -> bool:
        """Whether this router is about to stop."""
        return self._is_leaving.is_set()

    def leave(self) -> None:
        """The announcement is to be withdrawn."""
        self._is_leaving.set()

    def renew_soon(self) -> None:
        """Announce again: the bus may have come back without its store."""
        if self._announcer is not None:
            self._announcer.renew_soon()

    async def run(self, bus: Bus, endpoint: str) -> None:
        """Announce the router at this endpoint, until it leaves or the task is cancelled."""
        announcement = RouterAnnouncement(
            router_id=self._config.router_id,
            name=self._config.name,
            endpoint=endpoint,
            incarnation=self._incarnation,
        )
        self._announcer = announcer = Announcer(
            bus.js,
            self._subjects,
            router_key(announcement.router_id),
            self._incarnation,
            num_replicas=self._config.num_replicas,
        )
        try:
            await announcer.look()
            await announcer.claim(encode_entry(announcement))
            await self._renew_until_leaving(announcer)
        except* TwinError as group:
            twin = group.exceptions[0]
            log.error("%s; serving on, unannounced: give this router another --name", twin)
        finally:
            await announcer.withdraw()

    async def _renew_until_leaving(self, announcer: Announcer) -> None:
        async with asyncio.TaskGroup() as group:
            renewing = group.create_task(announcer.run())
            await self._is_leaving.wait()
            renewing.cancel()


async def until_informed(core: RouterCore, status: ServiceStatus) -> None:
    """Wait until the workers are known, `ANSWERS_AFTER_S` at the longest."""
    until_s = time.monotonic() + ANSWERS_AFTER_S
    while time.monotonic() < until_s:
        if status.is_informed(core):
            if core.fleet.schedulable_count() == len(core.fleet):
                return
            until_s = min(until_s, time.monotonic() + HEARS_ALL_S)
        await asyncio.sleep(_POLL_S)
