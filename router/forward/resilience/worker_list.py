"""The workers of the routing group, each with its endpoint.

The router lists them. The endpoint of a new worker is taken from a selection pinned to it.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from msgspec import Struct

from router.client import RouterClient, SelectRequest
from router.errors import KvRouterError
from router.forward.errors import reason_of
from router.forward.resilience.model_names import ModelNames, is_served_by, names_in
from router.protocol.requests import RankTarget
from router.protocol.values import Phase

log = logging.getLogger(__name__)

EVERY_S = 2.0
EVERY_WHILE_UNREADY_S = 0.5

LOOK_AGAIN_S = 120.0
"""Interval after which a known worker's endpoint is looked up again, in seconds."""

MOST_LOOKED_UP = 64
"""Limit of lookups per round; further workers follow in the next one."""

_PHASES: tuple[Phase | None, ...] = (None, "prefill")
"""The phases of lookups: a prefill worker is selected for no other phase."""


class ListedWorker(Struct, frozen=True):
    """A worker of the list."""

    worker_id: int
    model: str
    endpoint: str
    block_size: int


class WorkerList:
    """The workers that are known now, by id. `version`: counts changes of them.

    `names`: all names of their models. `problem`: why the list could not be refreshed the last
    time, or None.
    """

    def __init__(self, router: RouterClient, routing_group: str) -> None:
        self._router = router
        self._routing_group = routing_group
        self._checked_s: dict[int, float] = {}
        self._models: set[str] = set()
        self.names = ModelNames()
        self.workers: dict[int, ListedWorker] = {}
        self.version = 0
        self._listed: set[str] = set()
        self._rank_counts: Counter[int] = Counter()
        self.problem: str | None = "the router has not sent its list of workers yet"

    async def run(self) -> None:
        """Refresh the list every few seconds, until cancelled."""
        level = logging.WARNING
        while True:
            try:
                await self.refresh()
                level = logging.WARNING
            except KvRouterError as error:
                log.log(level, "the router's worker list is not available: %s", error)
                level = logging.DEBUG
            await asyncio.sleep(EVERY_WHILE_UNREADY_S if self.unready_reason() else EVERY_S)

    def unready_reason(self) -> str | None:
        """Return why no request can be served, as of the last refresh, or None."""
        if self.problem is not None or self._listed:
            return self.problem
        return "no workers in its routing group"

    @property
    def models(self) -> list[str]:
        """The models of all workers that are, or ever were, in the list."""
        return sorted(self._models)

    async def is_unknown(self, model: str) -> bool:
        """Return whether workers exist, but none ever served this model.

        With an empty list the router is queried first, since the list may not have been loaded yet.
        """
        if not self.workers:
            with suppress(KvRouterError):
                await self.refresh()
        return bool(self.workers) and model not in self._models

    async def is_gone(self, worker_id: int) -> bool:
        """Return whether the router does not list a worker any more."""
        try:
            await self.refresh()
        except KvRouterError:
            return False
        return worker_id not in self._rank_counts

    async def include(self, worker_id: int) -> None:
        """Refresh the list if a worker is not in it; it stays unlisted if that fails."""
        if worker_id not in self._rank_counts:
            with suppress(KvRouterError):
                await self.refresh()

    def rank_count(self, worker_id: int) -> int:
        """Return the number of a worker's ranks, as of the last refresh; 0 if it is not listed."""
        return self._rank_counts[worker_id]

    async def refresh(self) -> None:
        """Update the list. Raises KvRouterError, and then keeps the former list."""
        try:
            scopes = await self._router.loads()
        except KvRouterError as error:
            self.problem = f"the router's worker list is not available: {reason_of(error)}"
            raise
        own = [each for each in scopes if is_served_by(each, self._routing_group)]
        models = {load.worker_id: scope.model_name for scope in own for load in scope.loads}
        self.problem, self._listed = None, {each.model_name for each in own}
        self._rank_counts = Counter(load.worker_id for scope in own for load in scope.loads)
        self.names.replace(names_in(scopes, self._routing_group))
        self._models |= self._listed | self.names.all.keys()
        for worker_id in self.workers.keys() - models.keys():
            del self.workers[worker_id], self._checked_s[worker_id]
            self.version += 1
        for worker_id in self._due(models):
            await self._look_up(worker_id, models[worker_id])

    def _due(self, worker_ids: Iterable[int]) -> list[int]:
        oldest_s = time.monotonic() - LOOK_AGAIN_S
        due = [each for each in worker_ids if self._checked_s.get(each, oldest_s) <= oldest_s]
        return sorted(due, key=lambda each: each in self.workers)[:MOST_LOOKED_UP]

    async def _look_up(self, worker_id: int, model: str) -> None:
        """Look up a worker's endpoint; one that cannot be selected now is looked up again."""
        for phase in _PHASES:
            request = SelectRequest(
                token_ids=[0],
                model_name=model,
                routing_group=self._routing_group,
                pinned_worker=RankTarget(worker_id),
                phase=phase,
            )
            try:
                chosen = await self._router.select(request)
            except KvRouterError:
                continue
            self._checked_s[worker_id] = time.monotonic()
            listed = ListedWorker(worker_id, model, chosen.endpoint, chosen.block_size)
            self.version += self.workers.get(worker_id) != listed
            self.workers[worker_id] = listed
            return
