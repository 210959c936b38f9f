"""The block addresses of other workers, read from their announcements when needed."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress

from msgspec import Struct

from router.errors import WireError
from router.protocol.catalogue import decode_worker, worker_key
from router.protocol.subjects import Subjects
from router.protocol.values import Rank
from router.runtime.bus.connection import Bus, last_message
from router.runtime.bus.errors import BusUnavailableError

log = logging.getLogger(__name__)

KNOWN_S = 10.0
"""The lifetime of an entry: a restarted worker has other addresses."""
PATIENCE_S = 0.25
"""The timeout of a lookup; a request is then computed without the blocks."""
MAX_KNOWN = 4096


class _Known(Struct, frozen=True):
    addresses: Mapping[int, Sequence[str]]
    until_s: float


class PeerAddresses:
    """A cache of looked-up addresses; without a bus, entries stay valid."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._at: tuple[Bus, Subjects] | None = None

    async def run(self, bus: Bus, subjects: Subjects) -> None:
        """Use this bus for lookups until cancelled."""
        self._at = bus, subjects
        try:
            await asyncio.Event().wait()
        finally:
            self._at = None

    async def find(self, rank: Rank) -> Sequence[str]:
        """Return the block addresses of a rank; empty if it shares none or is unknown."""
        now_s, worker_id = asyncio.get_running_loop().time(), rank.worker_id
        known = self._known.get(worker_id)
        if known is None or now_s >= known.until_s:
            with suppress(BusUnavailableError, WireError, TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    known = self._remember(worker_id, await self._read(worker_id), now_s)
        return () if known is None else known.addresses.get(rank.dp_rank, ())

    async def _read(self, worker_id: int) -> Mapping[int, Sequence[str]]:
        """Read a worker's addresses from its announcement.

        Raises BusUnavailableError, WireError.
        """
        if self._at is None:
            raise BusUnavailableError("not connected")
        bus, subjects = self._at
        message = await last_message(
            bus.js, subjects.bucket_stream, subjects.key(worker_key(worker_id))
        )
        if message is None or not message.data:
            return {}
        return decode_worker(message.data).block_addresses

    def _remember(
        self, worker_id: int, addresses: Mapping[int, Sequence[str]], now_s: float
    ) -> _Known:
        known = self._known[worker_id] = _Known(addresses, now_s + KNOWN_S)
        self._known.move_to_end(worker_id)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return known
