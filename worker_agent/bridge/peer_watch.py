"""Other engines that share blocks, found by their announcements and named to ours.

announcements on the bus ─▶ PeerWatch ─▶ EngineTiers.name_peers ─▶ the connector asks them, unless
                                         their blockset is of no use to it
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress

from msgspec.structs import replace

from router.protocol.catalogue import WorkerAnnouncement, vllm_p2p_address
from router.protocol.subjects import Subjects
from router.runtime.bus.connection import Bus
from router.runtime.bus.errors import BusUnavailableError
from worker_agent.bridge.engine_tiers import EngineTiers, EngineTiersError
from worker_agent.operations.messages import MAX_NAMED_PEERS, AnnouncedBlockset
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
            peer
            for worker in self._announced.workers
            if worker.worker_id != self._ours.worker_id
            for peer in _peers_of(worker)
        ]
        others.sort(key=self._distance)
        ours = list(_peers_of(replace(self._ours, blocksets=self._tiers.blocksets)))
        for dp_rank in self._ours.block_addresses:
            peers = [*(each for each in ours if each.dp_rank != dp_rank), *others]
            with suppress(EngineTiersError):  # It is counted, and named again in the next round.
                await self._tiers.name_peers(dp_rank, peers[:MAX_NAMED_PEERS])

    def _distance(self, peer: AnnouncedBlockset) -> tuple[int, int]:
        """Return the place of a peer in an order that is the same in every round.

        It differs between engines, so that in a large fleet not all of them ask the same ones.
        """
        return peer.worker_id ^ self._ours.worker_id, peer.dp_rank


def _peers_of(worker: WorkerAnnouncement) -> Iterator[AnnouncedBlockset]:
    """Yield each rank that gives blocks to the connector, with its blockset, empty without one."""
    for dp_rank, addresses in worker.block_addresses.items():
        ours = next((each for each in addresses if vllm_p2p_address(each) is None), None)
        if ours is not None:
            blockset = worker.blocksets.get(dp_rank, {})
            yield AnnouncedBlockset(ours, worker.worker_id, dp_rank, blockset)
