"""Other engines that share blocks, found by their announcements and named to ours.

announcements on the bus ─▶ PeerWatch ─▶ EngineTiers.name_peers ─▶ the connector asks them
"""

import asyncio
from contextlib import suppress

from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.subjects import Subjects
from router.runtime.bus.connection import Bus
from router.runtime.bus.errors import BusUnavailableError
from worker_agent.bridge.engine_tiers import EngineTiers, EngineTiersError
from worker_agent.operations.messages import MAX_NAMED_PEERS
from worker_agent.process.announced import ROUND_S, AnnouncedWorkers


class PeerWatch:
    """The engines of one model that share blocks, as announced; ours excepted."""

    def __init__(self, tiers: EngineTiers, ours: WorkerAnnouncement) -> None:
        self._tiers = tiers
        self._ours = ours
        self._announced = AnnouncedWorkers(ours.model_name, ours.identity)

    async def run(self, bus: Bus, subjects: Subjects) -> None:
        """Name peers to the engine, until cancelled."""
        while True:
            with suppress(BusUnavailableError):
                await self._announced.refresh(bus, subjects)
                await self._name()
            await asyncio.sleep(ROUND_S)

    async def _name(self) -> None:
        """Name the peers to each rank; its own other ranks are peers, too."""
        others = [
            addresses[0]
            for worker in self._announced.workers
            for addresses in worker.block_addresses.values()
            if addresses and worker.worker_id != self._ours.worker_id
        ]
        for dp_rank in self._ours.block_addresses:
            ours = [
                each[0]
                for rank, each in self._ours.block_addresses.items()
                if rank != dp_rank and each
            ]
            with suppress(EngineTiersError):  # It is counted, and named again in the next round.
                await self._tiers.name_peers(dp_rank, [*ours, *others][:MAX_NAMED_PEERS])
