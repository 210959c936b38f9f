"""Another worker's blocks, as a read-only tier."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock

from msgspec import structs
from torch import Tensor

from worker_agent.blocks.changes import Change
from worker_agent.blocks.descriptors import BlockDescriptorList
from worker_agent.sharing.errors import BlocksetError
from worker_agent.sharing.pause import Pause
from worker_agent.sharing.peer_client import PeerClient
from worker_agent.transfer.block_tier import TierCounters
from worker_agent.transfer.block_window import Incoming
from worker_agent.transfer.plan import BlockResult

log = logging.getLogger(__name__)

MAX_LEASED_READS = 65_536


class LeasedReads:
    """Blocks to read under leases of the peer, by identity; for any thread.

    Beyond `MAX_LEASED_READS` the oldest are forgotten: they are read by name.
    """

    __slots__ = ("_blocks", "_lock")

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, tuple[BlockDescriptorList, int]] = OrderedDict()
        self._lock = Lock()

    def add(self, identities: Sequence[bytes], leased: BlockDescriptorList) -> None:
        """Add the leased blocks, of which these are the identities."""
        wanted = structs.replace(leased, block_indices=leased.block_indices[: len(identities)])
        with self._lock:
            for place in range(len(wanted.block_indices)):
                identity = identities[place]
                self._blocks[identity] = wanted, place
                self._blocks.move_to_end(identity)
            while len(self._blocks) > MAX_LEASED_READS:
                self._blocks.popitem(last=False)

    def take(self, identities: Sequence[bytes]) -> tuple[BlockDescriptorList | None, bool]:
        """Remove these blocks; return them as a list if one lease has all of them.

        Also returns whether the last block of that lease is among them.
        """
        with self._lock:
            found = [self._blocks.pop(each, None) for each in identities]
        first = found[0] if found else None
        if first is None:
            return None, False
        leased = first[0]
        places = [each[1] for each in found if each is not None and each[0] is leased]
        if len(places) < len(identities):
            return None, False
        indices = tuple(leased.block_indices[place] for place in places)
        is_last = places[-1] == len(leased.block_indices) - 1
        return structs.replace(leased, block_indices=indices), is_last


class PeerTier:
    """A block source over a peer connection.

    Calls block until the client's deadline; they are for a thread, one at a time.
    """

    __slots__ = ("_client", "_leased", "_name", "_pause", "counters")

    def __init__(
        self, name: str, client: PeerClient, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counters = TierCounters()
        self._name = name
        self._client = client
        self._leased = LeasedReads()
        self._pause = Pause(clock)

    def use_lease(self, identities: Sequence[bytes], leased: BlockDescriptorList) -> None:
        """Load these blocks under the lease, as far as it has them. Any thread may call it."""
        self._leased.add(identities, leased)

    def load(
        self, identities: Sequence[bytes], rows: Tensor, *, is_sampled: bool = False
    ) -> list[BlockResult]:
        """Copy blocks into rows; every block is verified, because it came over a connection."""
        del is_sampled
        if self._pause.is_on:
            return [BlockResult.FAILED] * len(identities)
        room = Incoming([row.numpy().data for row in rows[: len(identities)]])
        try:
            outcomes = self._received(identities, room)
        except BlocksetError as error:
            log.warning("%s refused the request: %s", self._name, error)
            outcomes = [BlockResult.FAILED] * len(identities)
        self._pause.note(failed=BlockResult.FAILED in outcomes)
        self.counters.loaded += outcomes.count(BlockResult.DONE)
        self.counters.failed += outcomes.count(BlockResult.FAILED)
        self.counters.corrupt += outcomes.count(BlockResult.CORRUPT)
        return outcomes

    def _received(self, identities: Sequence[bytes], room: Incoming) -> list[BlockResult]:
        """Read blocks under their lease, or else by name. Raises BlocksetError."""
        leased, is_last = self._leased.take(identities)
        if leased is None:
            return self._client.get_named(identities, room)
        try:
            outcomes = self._client.get(leased, room, identities)
            if is_last and BlockResult.FAILED not in outcomes:
                self._client.end(leased)
        except BlocksetError as error:  # It has expired, or the blocks are others by now.
            log.info("%s refused a lease: %s", self._name, error)
            return self._client.get_named(identities, room)
        return outcomes

    def take_changes(self) -> list[Change]:
        """Return no changes: the blocks of another worker are not tracked."""
        return []

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
