"""The announcements of the workers of one model, as read from the bus.

Each round reads at most `READS` of them, the ones read longest ago first: the cost for the bus does
not grow with the fleet, but in a large one a new worker is found after several rounds.
"""

import asyncio
from collections.abc import Sequence
from math import inf

from msgspec import Struct

from router.errors import WireError
from router.protocol.catalogue import WorkerAnnouncement, decode_worker, worker_key
from router.protocol.subjects import Subjects
from router.protocol.values import Identity
from router.runtime.bus.connection import Bus, key_subjects, last_message

ROUND_S = 5.0
"""The interval of rounds."""
READS = 32


class _Read(Struct, frozen=True):
    """An announcement, None if it does not suit ours, and the time when it was read."""

    worker: WorkerAnnouncement | None
    read_s: float


class AnnouncedWorkers:
    """The workers whose blocks have the names of ours, this one included."""

    __slots__ = ("_identity", "_known", "_model_name")

    def __init__(self, model_name: str, identity: Identity) -> None:
        self._model_name = model_name
        self._identity = identity
        self._known: dict[int, _Read] = {}
        """By worker, those read longest ago first."""

    @property
    def workers(self) -> Sequence[WorkerAnnouncement]:
        """Those that are announced, as they were read last."""
        return [each.worker for each in self._known.values() if each.worker is not None]

    def age_s(self, worker_id: int) -> float:
        """Return the time since the last read of a worker's announcement; infinite without one."""
        known = self._known.get(worker_id)
        return inf if known is None else asyncio.get_running_loop().time() - known.read_s

    async def refresh(self, bus: Bus, subjects: Subjects) -> list[WorkerAnnouncement]:
        """Read some announcements, and drop the workers without one; return those read.

        Raises BusUnavailableError.
        """
        keys = await key_subjects(bus.js, subjects, worker_key("*"))
        there = {int(last) for key in keys if (last := key.rpartition(".")[2]).isdecimal()}
        self._known = {each: found for each, found in self._known.items() if each in there}
        chosen = [*(there - self._known.keys()), *self._known][:READS]
        found = [await self.read(bus, subjects, worker_id) for worker_id in chosen]
        return [each for each in found if each is not None]

    async def read(self, bus: Bus, subjects: Subjects, worker_id: int) -> WorkerAnnouncement | None:
        """Read the announcement of one worker; return it, if it suits ours.

        Raises BusUnavailableError.
        """
        subject = subjects.key(worker_key(worker_id))
        message = await last_message(bus.js, subjects.bucket_stream, subject)
        self._known.pop(worker_id, None)
        found = self._suitable(message.data if message else None)
        self._known[worker_id] = _Read(found, asyncio.get_running_loop().time())
        return found

    def _suitable(self, entry: bytes | None) -> WorkerAnnouncement | None:
        if not entry:  # It has been withdrawn.
            return None
        try:
            found = decode_worker(entry)
        except WireError:
            return None
        is_ours = (found.model_name, found.identity) == (self._model_name, self._identity)
        return found if is_ours else None
