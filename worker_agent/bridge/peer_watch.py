"""Other engines that share blocks, found by their announcements and named to ours.

announcements on the bus ─▶ PeerWatch ─▶ EngineTiers.name_peers ─▶ the connector asks them

Each round reads at most `READS` announcements, the ones read longest ago first: the cost for the
bus does not grow with the fleet, but in a large one a new engine is found after several rounds.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from router.errors import WireError
from router.protocol.catalogue import WorkerAnnouncement, decode_worker, worker_key
from router.protocol.subjects import Subjects
from router.runtime.bus.connection import Bus, key_subjects, last_message
from router.runtime.bus.errors import BusUnavailableError
from worker_agent.bridge.engine_tiers import EngineTiers, EngineTiersError
from worker_agent.operations.messages import MAX_NAMED_PEERS

INTERVAL_S = 5.0
READS = 32


class PeerWatch:
    """The engines of one model that share blocks, as announced; ours excepted."""

    def __init__(self, tiers: EngineTiers, ours: WorkerAnnouncement) -> None:
        self._tiers = tiers
        self._ours = ours
        self._known: dict[str, Mapping[int, Sequence[str]]] = {}
        """Block addresses by subject, those read longest ago first; empty of unsuitable ones."""

    async def run(self, bus: Bus, subjects: Subjects) -> None:
        """Name peers to the engine, until cancelled."""
        while True:
            with suppress(BusUnavailableError):
                await self._read(bus, subjects)
                await self._name()
            await asyncio.sleep(INTERVAL_S)

    async def _read(self, bus: Bus, subjects: Subjects) -> None:
        own = subjects.key(worker_key(self._ours.worker_id))
        there = set(await key_subjects(bus.js, subjects, worker_key("*"))) - {own}
        self._known = {each: found for each, found in self._known.items() if each in there}
        oldest = [*(there - self._known.keys()), *self._known][:READS]
        for subject in oldest:
            message = await last_message(bus.js, subjects.bucket_stream, subject)
            self._known.pop(subject, None)
            self._known[subject] = self._addresses(message.data if message else None)

    def _addresses(self, entry: bytes | None) -> Mapping[int, Sequence[str]]:
        if not entry:  # It has been withdrawn.
            return {}
        with suppress(WireError):
            found = decode_worker(entry)
            if (found.model_name, found.identity) == (self._ours.model_name, self._ours.identity):
                return found.block_addresses
        return {}

    async def _name(self) -> None:
        """Name the peers to each rank; its own other ranks are peers, too."""
        others = [each[0] for found in self._known.values() for each in found.values() if each]
        for dp_rank in self._ours.block_addresses:
            ours = [
                each[0]
                for rank, each in self._ours.block_addresses.items()
                if rank != dp_rank and each
            ]
            with suppress(EngineTiersError):  # It is counted, and named again in the next round.
                await self._tiers.name_peers(dp_rank, [*ours, *others][:MAX_NAMED_PEERS])
