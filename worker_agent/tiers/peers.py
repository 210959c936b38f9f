"""Other workers, as blocks come up from them: a connection and a thread each, made when needed.

Whom to ask is said with every request; whether it is worth it is decided by what each of them was
measured to give.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeAlias

from router.protocol.values import Rank
from worker_agent.blocks.sources import PeerSource
from worker_agent.tiers.level import Giver, StackSettings
from worker_agent.tiers.way_down import EdgeCounters
from worker_agent.tiers.worker import Finished
from worker_agent.transfer.block_tier import BlockGiver

MAX_PEERS = 32
"""Connected at once, a rank; beyond, whoever was asked longest ago is let go."""


Connect: TypeAlias = Callable[[Rank, Sequence[str]], BlockGiver]


class Peers:
    """Belongs to the stack's owner. Invariant: at most `MAX_PEERS` of them are connected."""

    __slots__ = ("_connect", "_givers", "_settings", "up")

    def __init__(self, connect: Connect, settings: StackSettings) -> None:
        """`connect`: makes who gives blocks of a rank; it does not block, nor raise."""
        self._connect = connect
        self._settings = settings
        self._givers: OrderedDict[Rank, tuple[tuple[str, ...], Giver]] = OrderedDict()
        self.up = EdgeCounters()
        """What came of all of them."""

    def __len__(self) -> int:
        return len(self._givers)

    def giver(self, source: PeerSource, tell: Callable[[Finished], None]) -> Giver:
        """Who gives its blocks: a new one where it has moved. O(1)."""
        addresses = tuple(source.addresses)
        known = self._givers.get(source.rank)
        if known is None or known[0] != addresses:
            self._drop(source.rank)
            store = self._connect(source.rank, addresses)
            giver = Giver(f"peer-{source.rank}", store, self._settings, tell, up=self.up)
            self._givers[source.rank] = known = (addresses, giver)
        self._givers.move_to_end(source.rank)
        if len(self._givers) > MAX_PEERS:
            self._drop(next(iter(self._givers)))
        return known[1]

    def close(self) -> None:
        """Let all of them go, once what they were asked for has come."""
        for rank in list(self._givers):
            self._drop(rank)

    def _drop(self, rank: Rank) -> None:
        known = self._givers.pop(rank, None)
        if known is not None:
            known[1].worker.close(0.0)  # its thread ends by itself
