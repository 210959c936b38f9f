"""Announcement of a router to the other routers of its namespace.

The router announces itself at once, and accepts requests on the bus once it knows the workers: just
after start-up it would refuse requests that other routers can place.
"""

import asyncio
import logging
import time

from router.core.core import RouterCore
from router.observability.health import ServiceStatus
from router.protocol.catalogue import RouterAnnouncement, encode_entry, router_key
from router.protocol.subjects import Subjects
from router.runtime.bus.connection import Bus
from router.runtime.bus.errors import TwinError
from router.runtime.bus.kv_lease import KvLease

log = logging.getLogger(__name__)

ANSWERS_AFTER_S = 5.0
"""Longest delay from start-up to accepting requests on the bus, in seconds.

After it, requests are refused with the reason, which callers must receive from some router.
"""

HEARS_ALL_S = 1.0
"""Longest wait for further workers once one is schedulable, in seconds."""

_POLL_S = 0.05


class RouterPresence:
    """The announcement of a router, renewed while it is on the bus, until `leave`."""

    def __init__(
        self, router_id: int, name: str, incarnation: int, subjects: Subjects, num_replicas: int
    ) -> None:
        self._router_id = router_id
        self._name = name
        self._incarnation = incarnation
        self._num_replicas = num_replicas
        self._subjects = subjects
        self._announcer: KvLease | None = None
        self._is_leaving = asyncio.Event()

    @property
    def is_leaving(self) -> bool:
        """True if this router is about to stop."""
        return self._is_leaving.is_set()

    def leave(self) -> None:
        """Request the withdrawal of the announcement."""
        self._is_leaving.set()

    def renew_soon(self) -> None:
        """Announce the router again: the bus may have lost its store."""
        if self._announcer is not None:
            self._announcer.renew_soon()

    async def run(self, bus: Bus, endpoint: str) -> None:
        """Announce the router at this endpoint, until it leaves or the task is cancelled."""
        announcement = RouterAnnouncement(
            router_id=self._router_id,
            name=self._name,
            endpoint=endpoint,
            incarnation=self._incarnation,
        )
        self._announcer = announcer = KvLease(
            bus.js,
            self._subjects,
            router_key(announcement.router_id),
            self._incarnation,
            num_replicas=self._num_replicas,
        )
        try:
            await announcer.look()
            await announcer.claim(encode_entry(announcement))
            await self._renew_until_leaving(announcer)
        except* TwinError as group:
            twin = group.exceptions[0]
            log.error("%s; this router is not announced. Set another --name.", twin)
        finally:
            await announcer.withdraw()

    async def _renew_until_leaving(self, announcer: KvLease) -> None:
        async with asyncio.TaskGroup() as group:
            renewing = group.create_task(announcer.run())
            await self._is_leaving.wait()
            renewing.cancel()


async def until_informed(core: RouterCore, status: ServiceStatus) -> None:
    """Wait until the workers are known, at most for `ANSWERS_AFTER_S`."""
    until_s = time.monotonic() + ANSWERS_AFTER_S
    while time.monotonic() < until_s:
        if status.is_informed(core):
            if core.fleet.schedulable_count() == len(core.fleet):
                return
            until_s = min(until_s, time.monotonic() + HEARS_ALL_S)
        await asyncio.sleep(_POLL_S)
