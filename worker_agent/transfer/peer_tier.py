"""Another worker's blocks, as a tier that gives them and nothing else."""

import logging
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from router.blockset_errors import BlocksetError
from worker_agent.blocks.changes import Change
from worker_agent.transfer.block_tier import TierCounters
from worker_agent.transfer.outcome import Outcome
from worker_agent.transfer.peer_client import PeerClient
from worker_agent.transfer.window import Incoming

log = logging.getLogger(__name__)

LEFT_ALONE_S = 5.0
"""A worker that did not give what it should is not asked again for so long: its blocks are computed
at once instead.
"""


class PeerTier:
    """Calls block until the client's deadline: for a thread, one at a time."""

    __slots__ = ("_alone_until_s", "_client", "_clock", "_name", "counters")

    def __init__(
        self, name: str, client: PeerClient, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counters = TierCounters()
        self._name = name
        self._client = client
        self._clock = clock
        self._alone_until_s = 0.0

    def load(
        self, identities: Sequence[bytes], rows: Tensor, *, is_sampled: bool = False
    ) -> list[Outcome]:
        """Copy blocks into rows; each is proven, for it came from elsewhere."""
        del is_sampled
        if self._clock() < self._alone_until_s:
            return [Outcome.FAILED] * len(identities)
        room = Incoming([row.numpy().data for row in rows[: len(identities)]])
        try:
            outcomes = self._client.get_named(identities, room)
        except BlocksetError as error:
            log.warning("%s refuses: %s", self._name, error)
            outcomes = [Outcome.FAILED] * len(identities)
        if Outcome.FAILED in outcomes:
            self._alone_until_s = self._clock() + LEFT_ALONE_S
        self.counters.loaded += outcomes.count(Outcome.DONE)
        self.counters.failed += outcomes.count(Outcome.FAILED)
        self.counters.corrupt += outcomes.count(Outcome.CORRUPT)
        return outcomes

    def take_changes(self) -> list[Change]:
        """None: its blocks are not ours."""
        return []

    def close(self) -> None:
        """Hang up."""
        self._client.close()
