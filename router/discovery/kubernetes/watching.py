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
from typing import Any, Generic

from router.discovery.kubernetes.api_server import ApiServer, ApiServerError, GoneError, Q
from router.errors import ConfigError
from router.runtime.process.metrics import Rows, counter, gauge

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
NOT_FOUND = 404
STEADY_S = 5.0
"""A watch that lasted at least this long is followed by the next one without a delay."""


class ClusterWatch(Generic[Q]):
    """The cluster's objects of one kind, by name.

    `on_change` is called whenever they may have changed. `is_synced` is True while they are the
    cluster's, apart from changes in transit; `problem` is why they are not, None before the first
    response. The counters are totals of requests and of changes.

    `is_optional`: the cluster may lack this kind, and then has no objects of it.
    """

    def __init__(
        self,
        server: ApiServer[Q],
        on_change: Callable[[], None],
        random: Random,
        *,
        is_optional: bool = False,
    ) -> None:
        self._server = server
        self._on_change = on_change
        self._random = random
        self._is_optional = is_optional
        self._failures = 0
        self.objects: dict[str, Q] = {}
        self.problem: str | None = None
        self.was_listed = False
        self.is_synced = False
        self.lists = self.watches = self.forgotten = self.failures = self.changes = 0

    def ask(self, server: ApiServer[Q]) -> None:
        """Ask for other objects from the next list on, which takes the place of the known ones."""
        self._server = server

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
                if self._is_optional and _is_unknown_kind(error):
                    await self._await_kind()
                else:
                    await self._fail(error)

    async def _list(self) -> str:
        self.lists += 1
        objects, version = await self._server.listed()
        self._replace(objects)
        return version

    def _replace(self, objects: Iterable[Q]) -> None:
        self.objects = {each.metadata.name: each for each in objects}
        self.was_listed = self.is_synced = True
        self.problem = None
        self._on_change()

    async def _watch(self, version: str) -> str:
        """Apply changes until the watch ends or fails; return the version to continue from.

        Raises GoneError if the version has expired.
        """
        self.watches += 1
        began_s = time.monotonic()
        try:
            async for kind, each in self._server.watched(version, self._note_open):
                self._failures = 0
                version = each.metadata.resource_version or version
                self._take(kind, each)
        except GoneError:
            raise
        except (ApiServerError, ConfigError) as error:
            if _is_unknown_kind(error):
                raise
            await self._fail(error)
            return version
        if time.monotonic() - began_s < STEADY_S:
            await self._pause(failed=False)
        return version

    def _note_open(self) -> None:
        self.is_synced, self.problem = True, None

    def _take(self, kind: str, each: Q) -> None:
        if kind == "BOOKMARK":
            return
        self.changes += 1
        if kind == "DELETED":
            self.objects.pop(each.metadata.name, None)
        else:
            self.objects[each.metadata.name] = each
        self._on_change()

    async def _await_kind(self) -> None:
        """Wait until the cluster may know this kind, of which there are no objects yet."""
        if not self.was_listed:
            log.info("discovery: the cluster does not know %s", self._server.resource.name)
        self._replace(())
        await self._sleep(LONGEST_PAUSE_S)

    async def _fail(self, error: Exception) -> None:
        self.failures += 1
        self.is_synced = False
        if self.problem != str(error):
            log.warning("discovery failed: %s; the last known objects stay in use", error)
        self.problem = str(error)
        await self._pause(failed=True)

    async def _pause(self, *, failed: bool) -> None:
        """Sleep for a delay that doubles with each failure, with jitter."""
        self._failures = self._failures + 1 if failed else 0
        await self._sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._failures, 10)))

    async def _sleep(self, longest_s: float) -> None:
        """Wait for half of a time to all of it, so that routers do not ask in step."""
        await asyncio.sleep(longest_s * (0.5 + self._random.random() / 2))


def _is_unknown_kind(error: ApiServerError | ConfigError) -> bool:
    """Return whether the cluster does not know the kind of objects, or no longer does."""
    return isinstance(error, ApiServerError) and error.status == NOT_FOUND


class Watches:
    """Several watches, counted together."""

    def __init__(self, *watches: ClusterWatch[Any]) -> None:
        self._watches = watches

    @property
    def is_synced(self) -> bool:
        """True while all are in step with the cluster."""
        return all(each.is_synced for each in self._watches)

    @property
    def lists(self) -> int:
        """Lists requested."""
        return sum(each.lists for each in self._watches)

    @property
    def watches(self) -> int:
        """Watches started."""
        return sum(each.watches for each in self._watches)

    @property
    def changes(self) -> int:
        """Changes received."""
        return sum(each.changes for each in self._watches)

    @property
    def forgotten(self) -> int:
        """Resource versions that the server no longer had."""
        return sum(each.forgotten for each in self._watches)

    @property
    def failures(self) -> int:
        """Requests that failed."""
        return sum(each.failures for each in self._watches)


PREFIX = "kv_router_discovery_"
WATCH_METRICS: Rows = {
    "synced": gauge("1 while the known objects are up to date with the cluster", "is_synced"),
    "lists": counter("Lists of all objects requested"),
    "watches": counter("Watches started"),
    "changes": counter("Changes received from watches"),
    "forgotten": counter("Resource versions that the server no longer had (410)"),
    "failures": counter("Requests that failed"),
}
"""Metrics of `Watches`."""
