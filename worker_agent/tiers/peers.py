"""Other workers as block sources: a connection and a thread for each, created on first use.

Each load request names the worker to use; its measured speed decides whether blocks are loaded from
it.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from msgspec import Struct

from router.protocol.values import Rank
from worker_agent.blocks.descriptors import BlockDescriptorList, PeerSource
from worker_agent.tiers.level import BlockSource, StackSettings
from worker_agent.tiers.offload_lane import EdgeCounters
from worker_agent.tiers.worker import Finished
from worker_agent.transfer.block_tier import BlockGiver

MAX_PEERS = 32
"""Limit of connected peers of a rank; beyond it, the least recently used is disconnected."""


class PeerGiver(BlockGiver, Protocol):
    """The blocks of another worker, some of which it keeps for us under a lease."""

    def use_lease(self, identities: Sequence[bytes], leased: BlockDescriptorList) -> None:
        """Load these blocks under the lease when they are loaded, as far as it has them."""


Connect: TypeAlias = Callable[[Rank, Sequence[str]], PeerGiver]


class _Peer(Struct, frozen=True):
    addresses: tuple[str, ...]
    store: PeerGiver
    source: BlockSource


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
        self._givers: OrderedDict[Rank, _Peer] = OrderedDict()
        self.up = EdgeCounters()
        """Counters of the blocks loaded from all peers together."""

    def __len__(self) -> int:
        return len(self._givers)

    def giver(
        self,
        source: PeerSource,
        identities: Sequence[bytes],
        on_finished: Callable[[Finished], None],
    ) -> BlockSource:
        """Return the block source of a rank; a new one if its addresses have changed.

        `identities`: of the blocks to load, the first of which may be leased. O(leased blocks).
        """
        addresses = tuple(source.addresses)
        known = self._givers.get(source.rank)
        if known is None or known.addresses != addresses:
            self._drop(source.rank)
            store = self._connect(source.rank, addresses)
            giver = BlockSource(
                f"peer-{source.rank}", store, self._settings, on_finished, up=self.up
            )
            self._givers[source.rank] = known = _Peer(addresses, store, giver)
        self._givers.move_to_end(source.rank)
        if len(self._givers) > MAX_PEERS:
            self._drop(next(iter(self._givers)))
        if source.leased is not None:
            known.store.use_lease(identities, source.leased)
        return known.source

    def close(self) -> None:
        """Disconnect all peers, each after its pending calls."""
        for rank in list(self._givers):
            self._drop(rank)

    def _drop(self, rank: Rank) -> None:
        known = self._givers.pop(rank, None)
        if known is not None:
            known.source.worker.close(0.0)  # Its thread ends by itself.
