"""A copy of the cluster's objects, kept up to date by list and watch.

list ─▶ watch from its version ─▶ ended: watch again from the last change
 ▲         │ 410: version expired     failed: the same, after a delay
 └─────────┘
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from random import Random

from router.discovery.kubernetes.api_server import ApiServer, ApiServerError, GoneError
from router.discovery.kubernetes.objects import ClusterObject
from router.errors import ConfigError

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
STEADY_S = 5.0
"""A watch that lasted at least this long is followed by the next one without a delay."""


class ClusterWatch:
    """The cluster's objects, by name.

    `on_change` is called whenever they may have changed. `is_synced` is True while they are the
    cluster's, apart from changes in transit. The counters are totals of requests and of changes.
    """

    def __init__(self, server: ApiServer, on_change: Callable[[], None], random: Random) -> None:
        self._server = server
        self._on_change = on_change
        self._random = random
        self._failures = 0
        self.objects: dict[str, ClusterObject] = {}
        self.was_listed = False
        self.is_synced = False
        self.lists = self.watches = self.forgotten = self.failures = self.changes = 0

    async def run(self) -> None:
        """Follow the cluster until cancelled; errors are logged and retried."""
        while True:
            try:
                version = await self._list()
                while True:
                    version = await self._watch(version)
            except GoneError as error:
                self.forgotten += 1
                log.info("discovery lists again: %s", error)
                await self._pause(failed=False)
            except (ApiServerError, ConfigError) as error:
                await self._fail(error)

    async def _list(self) -> str:
        self.lists += 1
        objects, version = await self._server.listed()
        self._replace(objects)
        return version

    def _replace(self, objects: Iterable[ClusterObject]) -> None:
        self.objects = {each.metadata.name: each for each in objects}
        self.was_listed = self.is_synced = True
        self._on_change()

    async def _watch(self, version: str) -> str:
        """Apply changes until the watch ends or fails; return the version to continue from.

        Raises GoneError if the version has expired.
        """
        self.watches += 1
        began_s = time.monotonic()
        try:
            async for kind, each in self._server.watched(version):
                self.is_synced, self._failures = True, 0
                version = each.metadata.resource_version or version
                self._take(kind, each)
        except GoneError:
            raise
        except (ApiServerError, ConfigError) as error:
            await self._fail(error)
            return version
        if time.monotonic() - began_s < STEADY_S:
            await self._pause(failed=False)
        return version

    def _take(self, kind: str, each: ClusterObject) -> None:
        if kind == "BOOKMARK":
            return
        self.changes += 1
        if kind == "DELETED":
            self.objects.pop(each.metadata.name, None)
        else:
            self.objects[each.metadata.name] = each
        self._on_change()

    async def _fail(self, error: Exception) -> None:
        self.failures += 1
        self.is_synced = False
        log.warning("discovery failed: %s; the last known engines stay registered", error)
        await self._pause(failed=True)

    async def _pause(self, *, failed: bool) -> None:
        """Sleep for a delay that doubles with each failure, with jitter."""
        self._failures = self._failures + 1 if failed else 0
        longest_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._failures, 10))
        await asyncio.sleep(longest_s * (0.5 + self._random.random() / 2))
