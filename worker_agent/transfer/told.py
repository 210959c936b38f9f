"""Which blocks of a shared store routers were told of, and for how long that is so."""

from collections.abc import Iterable
from itertools import takewhile

from msgspec import Struct

from worker_agent.blocks.changes import BlockRemoved, BlockStored, CacheCleared, Change
from worker_agent.blocks.names import BlockName


class _Told(Struct, frozen=True):
    name: BlockName
    until_s: float


class ToldNames:
    """Names by when they were told last; each is told for `ttl_s`, and no more than `max_names`."""

    __slots__ = ("_changes", "_max_names", "_told", "_ttl_s")

    def __init__(self, max_names: int, ttl_s: float) -> None:
        self._max_names = max_names
        self._ttl_s = ttl_s
        self._told: dict[bytes, _Told] = {}
        self._changes: list[Change] = []

    def __len__(self) -> int:
        return len(self._told)

    def tell(self, name: BlockName, now_s: float) -> None:
        """It is there, for a while from now."""
        if self._told.pop(name.identity, None) is None:
            self._changes.append(BlockStored(name))
        self._told[name.identity] = _Told(name, now_s + self._ttl_s)
        if len(self._told) > self._max_names:
            self.untell([next(iter(self._told))])

    def tell_again(self, identities: Iterable[bytes], now_s: float) -> None:
        """Those that were told of are there for a while from now."""
        for told in [self._told[each] for each in identities if each in self._told]:
            self.tell(told.name, now_s)

    def untell(self, identities: Iterable[bytes]) -> None:
        """They are not there."""
        for identity in identities:
            told = self._told.pop(identity, None)
            if told is not None:
                self._changes.append(BlockRemoved(told.name))

    def clear(self) -> None:
        """Nothing is there."""
        self._told.clear()
        self._changes = [CacheCleared()]

    def take_changes(self, now_s: float) -> list[Change]:
        """What is to be told, in order; what is over by now is gone."""
        # Who is told of anew is last: those whose time is over are the first.
        over = takewhile(lambda item: item[1].until_s <= now_s, self._told.items())
        self.untell([identity for identity, _ in over])
        changes, self._changes = self._changes, []
        return changes
