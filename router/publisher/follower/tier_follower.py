"""The follower of the block manager inside an engine: from its socket to its source of a journal.

connect ─▶ TierFeed ─▶ OneSource ─▶ on_news: the owner of the journal takes new messages
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import closing

from router.errors import WireError
from router.publisher.batch_order.batch_order import UNKNOWN_S
from router.publisher.feed.log_limiter import LogLimiter
from router.publisher.feed.tier_feed import TierFeed
from router.publisher.feed.tier_wire import LENGTH, MAX_MESSAGE_BYTES, Message, decode
from router.publisher.journal.consolidator import SourceView

log = logging.getLogger(__name__)

CONNECT_S = 2.0
SILENCE_S = 5.0
"""The timeout of a silent manager, after which it is connected again. A manager without changes
sends an empty message every 0.2 s."""
_RETRY_S = (0.1, 0.2, 0.5, 1.0)

OnNews = Callable[[float], None]
"""A function called when the journal may have messages, with the time after which the changes may
have happened."""


class TierFollower:
    """A follower of one rank's block manager. `problem`: the current problem, or None."""

    def __init__(
        self,
        address: str,
        source: SourceView,
        dp_rank: int,
        on_news: OnNews,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a follower that is not connected yet.

        `address`: tcp://host:port, or ipc:///path.
        """
        self._address = address
        self._feed = TierFeed(source, dp_rank)
        self._on_news = on_news
        self._clock = clock
        self._proven_s = clock() - UNKNOWN_S
        self._complaints = LogLimiter()
        self.messages = 0
        self.failures = 0
        self.problem: str | None = f"no connection to its tiers at {address} yet"

    @property
    def held_blocks(self) -> int:
        """The number of blocks the manager is known to hold, each counted once per tier."""
        return self._feed.held_blocks

    @property
    def snapshots(self) -> int:
        """The number of snapshots received."""
        return self._feed.snapshots

    @property
    def is_current(self) -> bool:
        """True if the blocks are those of the current connection's snapshot."""
        return self._feed.is_current

    def waiting_s(self, now_s: float) -> float:
        """Return for how long messages of the manager may have been missing."""
        return now_s - self._proven_s

    async def run(self) -> None:
        """Follow the manager until cancelled, through all its lives."""
        attempt = 0
        while True:
            snapshots = self.snapshots
            try:
                await self._connection()
            except WireError as error:
                self._feed.forget()
                self._fail(error.reason)
            except (OSError, EOFError, TimeoutError) as error:
                self._fail(str(error) or type(error).__name__)
            self._report()
            attempt = 0 if self.snapshots > snapshots else attempt + 1
            await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])

    async def _connection(self) -> None:
        """Follow one connection to its end."""
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await _connected(self._address)
        self._feed.begin()
        with closing(writer):
            while True:
                async with asyncio.timeout(SILENCE_S):
                    message = await _read(reader)
                self._take(message)

    def _take(self, message: Message) -> None:
        self.messages += 1
        is_all = self._feed.take(message)
        self._report()
        if is_all:
            self._proven_s = self._clock()
            self.problem = None

    def _report(self) -> None:
        self._on_news(self._proven_s)

    def _fail(self, reason: str) -> None:
        self.failures += 1
        self._feed.begin()
        self.problem = f"its tiers at {self._address}: {reason}"
        self._complaints.add(self.problem)
        for sentence in self._complaints.take(self._clock()):
            log.warning("%s", sentence)


async def _read(reader: asyncio.StreamReader) -> Message:
    """Read the next message.

    Raises WireError, and IncompleteReadError if the manager closed the connection.
    """
    [length] = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {length} bytes (allowed: {MAX_MESSAGE_BYTES})")
    return decode(await reader.readexactly(length))


async def _connected(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    kind, _, place = address.partition("://")
    if kind == "ipc":
        return await asyncio.open_unix_connection(place)
    host, _, port = place.rpartition(":")
    return await asyncio.open_connection(host.strip("[]"), int(port))
