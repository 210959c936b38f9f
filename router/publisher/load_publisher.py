"""The publisher of one rank's load, which returns the beacons that the agent received."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from router.protocol.loads import Beacon, LoadReport, encode_load_report
from router.runtime.bus.errors import BusUnavailableError
from router.runtime.bus.transport import Transport

MAX_SOURCES = 64
KEPT_S = 5.0


class ReceivedBeacons:
    """The last beacon of each source that sent one within `KEPT_S`.

    Limited to `MAX_SOURCES` sources; beyond that, the source silent for longest is dropped.
    """

    __slots__ = ("_beacons",)

    def __init__(self) -> None:
        self._beacons: OrderedDict[int, tuple[int, float]] = OrderedDict()

    def record(self, beacon: Beacon, now_s: float) -> None:
        """Record a beacon."""
        self._beacons[beacon.source_id] = (beacon.beacon_id, now_s)
        self._beacons.move_to_end(beacon.source_id)
        if len(self._beacons) > MAX_SOURCES:
            self._beacons.popitem(last=False)

    def last(self, now_s: float) -> dict[int, int]:
        """Return the id of the last beacon of each source, by source."""
        while self._beacons and now_s - next(iter(self._beacons.values()))[1] > KEPT_S:
            self._beacons.popitem(last=False)
        return {source_id: beacon_id for source_id, (beacon_id, _) in self._beacons.items()}


CHANGE_DELAY_S = 0.05
"""The time within which changes are combined into one report."""


class LoadPublisher:
    """The load publisher of one rank. Reports are also heartbeats, sent even without changes."""

    def __init__(
        self,
        read: Callable[[], LoadReport],
        subject: str,
        *,
        interval_s: float,
    ) -> None:
        self._read = read
        self._subject = subject
        self._interval_s = interval_s
        self._changed = asyncio.Event()
        self.missed = 0

    def changed(self) -> None:
        """Publish a report soon."""
        self._changed.set()

    async def run(self, transport: Transport) -> None:
        """Publish until cancelled. A report that cannot be sent is superseded by the next."""
        while True:
            self._changed.clear()
            await self.publish(transport)
            await self._wait()

    async def publish(self, transport: Transport) -> None:
        """Publish a report now."""
        try:
            await transport.broadcast(self._subject, encode_load_report(self._read()))
        except BusUnavailableError:
            self.missed += 1

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._interval_s):
                await self._changed.wait()
                await asyncio.sleep(CHANGE_DELAY_S)
        except TimeoutError:
            pass
