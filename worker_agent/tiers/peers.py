"""Other workers as block sources: a connection and a thread for each, created on first use.

Each load request names the worker to use; its measured speed decides whether blocks are loaded from
it.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeAlias

from router.protocol.values import Rank
from worker_agent.blocks.changes import PeerSource
from worker_agent.tiers.level import BlockSource, StackSettings
from worker_agent.tiers.offload_lane import EdgeCounters
from worker_agent.tiers.worker import Finished
from worker_agent.transfer.block_tier import BlockGiver

MAX_PEERS = 32
"""Limit of connected peers of a rank; beyond it, the least recently used is disconnected."""


Connect: TypeAlias = Callable[[Rank, Sequence[str]], BlockGiver]


class PeerTiers:
    """Block sources of other workers. Belongs to the stack's owner.

    Invariant: at most `MAX_PEERS` workers are connected.
    """

    __slots__ = ("_connect", "_givers", "_settings", "up")

    def __init__(self, connect: Connect, settings: StackSettings) -> None:
        """Create an empty set of peers.

        `connect`: returns the block source of a rank, without blocking or raising.
        """
        self._connect = connect
        self._settings = settings
        self._givers: OrderedDict[Rank, tuple[tuple[str, ...], BlockSource]] = OrderedDict()
        self.up = EdgeCounters()
        """Counters of the blocks loaded from all peers together."""

    def __len__(self) -> int:
        return len(self._givers)

    def giver(self, source: PeerSource, on_finished: Callable[[Finished], None]) -> BlockSource:
        """Return the block source of a rank; a new one if its addresses have changed. O(1)."""
        addresses = tuple(source.addresses)
        known = self._givers.get(source.rank)
        if known is None or known[0] != addresses:
            self._drop(source.rank)
            store = self._connect(source.rank, addresses)
            giver = BlockSource(
                f"peer-{source.rank}", store, self._settings, on_finished, up=self.up
            )
            self._givers[source.rank] = known = (addresses, giver)
        self._givers.move_to_end(source.rank)
        if len(self._givers) > MAX_PEERS:
            self._drop(next(iter(self._givers)))
        return known[1]

    def close(self) -> None:
        """Disconnect all peers, each after its pending calls."""
        for rank in list(self._givers):
            self._drop(rank)

    def _drop(self, rank: Rank) -> None:
        known = self._givers.pop(rank, None)
        if known is not None:
            known[1].worker.close(0.0)  # Its thread ends by itself.
