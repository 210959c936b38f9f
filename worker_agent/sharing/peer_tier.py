"""Another worker's blocks, as a read-only tier."""

import logging
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from worker_agent.blocks.changes import Change
from worker_agent.sharing.errors import BlocksetError
from worker_agent.sharing.peer_client import PeerClient
from worker_agent.transfer.block_tier import TierCounters
from worker_agent.transfer.block_window import Incoming
from worker_agent.transfer.plan import BlockResult

log = logging.getLogger(__name__)

LEFT_ALONE_S = 5.0
MAX_LEFT_ALONE_S = 80.0


class Pause:
    """The time for which a worker that failed is left alone: 5 s, doubled up to 80 while it fails.

    Meanwhile its blocks are computed. Each failure may take a whole timeout, hence the doubling.
    """

    __slots__ = ("_clock", "_length_s", "_until_s")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._length_s = LEFT_ALONE_S
        self._until_s = float("-inf")

    @property
    def is_on(self) -> bool:
        """True while the worker is left alone."""
        return self._clock() < self._until_s

    def note(self, *, failed: bool) -> None:
        """Record the outcome of a call to the worker."""
        if not failed:
            self._length_s = LEFT_ALONE_S
            return
        self._until_s = self._clock() + self._length_s
        self._length_s = min(2 * self._length_s, MAX_LEFT_ALONE_S)


class PeerTier:
    """A block source over a peer connection.

    Calls block until the client's deadline; they are for a thread, one at a time.
    """

    __slots__ = ("_client", "_name", "_pause", "counters")

    def __init__(
        self, name: str, client: PeerClient, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counters = TierCounters()
        self._name = name
        self._client = client
        self._pause = Pause(clock)

    def load(
        self, identities: Sequence[bytes], rows: Tensor, *, is_sampled: bool = False
    ) -> list[BlockResult]:
        """Copy blocks into rows; every block is verified, because it came over a connection."""
        del is_sampled
        if self._pause.is_on:
            return [BlockResult.FAILED] * len(identities)
        room = Incoming([row.numpy().data for row in rows[: len(identities)]])
        try:
            outcomes = self._client.get_named(identities, room)
        except BlocksetError as error:
            log.warning("%s refused the request: %s", self._name, error)
            outcomes = [BlockResult.FAILED] * len(identities)
        self._pause.note(failed=BlockResult.FAILED in outcomes)
        self.counters.loaded += outcomes.count(BlockResult.DONE)
        self.counters.failed += outcomes.count(BlockResult.FAILED)
        self.counters.corrupt += outcomes.count(BlockResult.CORRUPT)
        return outcomes

    def take_changes(self) -> list[Change]:
        """Return no changes: the blocks of another worker are not tracked."""
        return []

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
