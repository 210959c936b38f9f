"""Publishes how busy one rank is: every interval, and soon after a change."""

import asyncio
from collections.abc import Callable

from router.bus_errors import BusUnavailableError
from router.protocol.loads import LoadReport, encode_load_report
from router.publisher.transport import Transport

CHANGE_DELAY_S = 0.05
"""Changes within this time make one report."""


class LoadPublisher:
    """Load publisher of one rank; reports are its heartbeat too, so they go out without news."""

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
        """Report soon."""
        self._changed.set()

    async def run(self, transport: Transport) -> None:
        """Report until cancelled. A report that cannot be sent is superseded by the next."""
        while True:
            self._changed.clear()
            await self.publish(transport)
            await self._wait()

    async def publish(self, transport: Transport) -> None:
        """Report now."""
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
