"""The watch over registered workers: what is wrong with one is set in the core, and said once.

sockets of `Engines`, `EngineServers` ──▶ verdict ──▶ core (trust, lifecycle) , log, timeline
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from random import Random

from msgspec.structs import replace

from router.core.commands import SetProblem, SetSourceFault
from router.core.core import RouterCore
from router.core.registered_workers import RegisteredWorker
from router.discovery.engine_servers import EngineServers, is_server
from router.discovery.worker_verdicts import Verdict, verdict
from router.indexer.rank_index import SourceFault
from router.ingest.direct_rank import RankSockets
from router.ingest.engines import Engines
from router.observability.event_timeline import EventTimeline
from router.protocol.replies import TrustState
from router.protocol.values import Rank
from router.runtime.process.ticks import next_tick

log = logging.getLogger(__name__)

LOOK_S = 0.5
WORKERS_AT_ONCE = 64
"""Workers looked at without a pause."""


_SAID = (TrustState.DEGRADED, TrustState.APPROXIMATE)


class WorkerWatch:
    """A regular look at every registered worker.

    `held`: reasons not to choose workers that are known from elsewhere, by id; `asks_servers`: HTTP
    servers are asked too.
    """

    def __init__(
        self,
        core: RouterCore,
        engines: Engines,
        timeline: EventTimeline,
        held: Mapping[int, str],
        random: Random,
        *,
        asks_servers: bool,
    ) -> None:
        self._core = core
        self._engines = engines
        self._timeline = timeline
        self._held = held
        self._servers = EngineServers(random)
        self._asks_servers = asks_servers

    async def run(self) -> None:
        """Look at all workers again and again, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await next_tick(LOOK_S)
                self._ask_servers(group)
                sockets = self._engines.sockets(time.monotonic())
                for number, worker in enumerate(list(self._registered()), 1):
                    self._judge(worker, sockets.get(worker.worker_id, {}))
                    if number % WORKERS_AT_ONCE == 0:
                        await asyncio.sleep(0)

    def _ask_servers(self, group: asyncio.TaskGroup) -> None:
        if self._asks_servers:
            named = {each.worker_id: each.endpoint for each in self._registered()}
            servers = {i: endpoint for i, endpoint in named.items() if is_server(endpoint)}
            self._servers.ask(servers, group, time.monotonic())

    def _registered(self) -> Iterator[RegisteredWorker]:
        announced = (worker.announcement for worker in self._core.fleet)
        return (each for each in announced if isinstance(each, RegisteredWorker))

    def _judge(self, worker: RegisteredWorker, sockets: dict[Rank, RankSockets]) -> None:
        has_server = self._asks_servers and is_server(worker.endpoint)
        server = self._servers.state(worker.worker_id) if has_server else None
        found = verdict(worker, sockets, server)
        if worker.worker_id in self._held:
            found = replace(found, problem=self._held[worker.worker_id], is_unreachable=False)
        self._set(worker, found)

    def _set(self, worker: RegisteredWorker, found: Verdict) -> None:
        """Set in the core what has changed. Nothing else sets problems and faults."""
        worker_id = worker.worker_id
        known = self._core.fleet.get(worker_id)
        if known is None or known.announcement is not worker:
            return
        if known.problem != found.problem:
            command = SetProblem(worker_id, found.problem, found.is_unreachable)
            self._core.handle(command, time.monotonic())
            self._say_problem(worker_id, found.problem)
        for rank in worker.ranks:
            fault, before = found.faults.get(rank), self._core.index.fault(rank)
            if fault != before:
                self._core.handle(SetSourceFault(rank, fault), time.monotonic())
                if found.problem is None:
                    self._say_fault(rank, before, fault)

    def _say_problem(self, worker_id: int, problem: str | None) -> None:
        if problem is None:
            log.info("worker %d can be chosen again", worker_id)
            self._timeline.note("worker_fault", "good", worker_id, "can be chosen again")
        else:
            log.warning("worker %d is not chosen: %s", worker_id, problem)
            self._timeline.note("worker_fault", "fault", worker_id, problem)

    def _say_fault(self, rank: Rank, before: SourceFault | None, fault: SourceFault | None) -> None:
        """Say what is wrong with a rank. Of a lost connection, its follower says so."""
        if fault is not None:
            self._timeline.note("source_fault", "warning", rank, fault.text)
            if self._core.trust(rank, time.monotonic()).state in _SAID:
                log.warning("rank %s: %s", rank, fault.text)
        elif before is not None and before.effect != "explain":
            self._timeline.note("source_fault", "good", rank, f"no longer: {before.text}")
            log.info("rank %s: no longer: %s", rank, before.text)
