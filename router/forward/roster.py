"""Who is there: the workers of the router's group, each with where it listens.

The router is asked who they are, and of each newcomer where: by a choice that only it can be.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import suppress

from msgspec import Struct

from router.client import RouterClient, SelectRequest
from router.errors import KvRouterError
from router.protocol.requests import RankTarget
from router.protocol.values import Phase

log = logging.getLogger(__name__)

EVERY_S = 2.0

LOOK_AGAIN_S = 120.0
"""At one that is known: it may have moved."""

MOST_LOOKED_UP = 64
"""In one round; the others come in the next."""

_PHASES: tuple[Phase | None, ...] = (None, "prefill")
"""Who computes prompts for others is chosen for nothing else."""


class Worker(Struct, frozen=True):
    """One of them."""

    worker_id: int
    model: str
    endpoint: str
    block_size: int


class Roster:
    """The workers that are known now, by id."""

    def __init__(self, router: RouterClient, routing_group: str) -> None:
        self._router = router
        self._routing_group = routing_group
        self._looked_s: dict[int, float] = {}
        self._models: set[str] = set()
        self.workers: dict[int, Worker] = {}

    async def run(self) -> None:
        """Until cancelled."""
        level = logging.WARNING
        while True:
            try:
                await self.refresh()
                level = logging.WARNING
            except KvRouterError as error:
                log.log(level, "the router does not list its workers: %s", error)
                level = logging.DEBUG
            await asyncio.sleep(EVERY_S)

    @property
    def models(self) -> list[str]:
        """The models of all who are there, or ever were."""
        return sorted(self._models)

    async def is_unknown(self, model: str) -> bool:
        """Whether others are there, and nobody ever was of this model.

        Where nobody is known, the router is asked first: this round's answer may not be here yet.
        """
        if not self.workers:
            with suppress(KvRouterError):
                await self.refresh()
        return bool(self.workers) and model not in self._models

    async def refresh(self) -> None:
        """Look who came and who went. Raises KvRouterError, and then knows what it knew before."""
        models = {
            load.worker_id: scope.model_name
            for scope in await self._router.loads()
            for load in scope.loads
            if scope.routing_group == self._routing_group
        }
        self._models.update(models.values())
        for worker_id in self.workers.keys() - models.keys():
            del self.workers[worker_id], self._looked_s[worker_id]
        for worker_id in self._due(models):
            await self._look_up(worker_id, models[worker_id])

    def _due(self, worker_ids: Iterable[int]) -> list[int]:
        oldest_s = time.monotonic() - LOOK_AGAIN_S
        due = [each for each in worker_ids if self._looked_s.get(each, oldest_s) <= oldest_s]
        return sorted(due, key=lambda each: each in self.workers)[:MOST_LOOKED_UP]

    async def _look_up(self, worker_id: int, model: str) -> None:
        """One that may not be chosen now is looked at again."""
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
            self._looked_s[worker_id] = time.monotonic()
            self.workers[worker_id] = Worker(worker_id, model, chosen.endpoint, chosen.block_size)
            return
