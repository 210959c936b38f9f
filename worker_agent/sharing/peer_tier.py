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
"""Pause after a load with a failed block; meanwhile the worker's blocks are computed instead."""
MAX_LEFT_ALONE_S = 80.0
"""Limit of the pause, which doubles while loads fail: each failure may take a whole timeout."""


class PeerTier:
    """A block source over a peer connection.

    Calls block until the client's deadline; they are for a thread, one at a time.
    """

    __slots__ = ("_alone_until_s", "_client", "_clock", "_name", "_pause_s", "counters")

    def __init__(
        self, name: str, client: PeerClient, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counters = TierCounters()
        self._name = name
        self._client = client
        self._clock = clock
        self._alone_until_s = 0.0
        self._pause_s = LEFT_ALONE_S

    def load(
        self, identities: Sequence[bytes], rows: Tensor, *, is_sampled: bool = False
    ) -> list[BlockResult]:
        """Copy blocks into rows; every block is verified, because it came over a connection."""
        del is_sampled
        if self._clock() < self._alone_until_s:
            return [BlockResult.FAILED] * len(identities)
        room = Incoming([row.numpy().data for row in rows[: len(identities)]])
        try:
            outcomes = self._client.get_named(identities, room)
        except BlocksetError as error:
            log.warning("%s refused the request: %s", self._name, error)
            outcomes = [BlockResult.FAILED] * len(identities)
        if BlockResult.FAILED in outcomes:
            self._alone_until_s = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, MAX_LEFT_ALONE_S)
        else:
            self._pause_s = LEFT_ALONE_S
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
