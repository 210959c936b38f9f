"""From an engine's own names to sequence hashes, with a count of copies per tier: one rank's.

    state ──▶ rows   40 bytes a block, touched as they fill; grown twofold without being copied
          └─▶ slots   8 bytes each, at most 3/4 in use; grown twofold, a few with every block

What the words mean is in `_map_rows`, what happens to them in `_map_kernel`.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from router.fresh_memory import FormerTable, GrowingWords, zeros
from router.protocol.values import TIERS, HashArray, Tier
from router.publisher import _map_kernel, _map_rows, _map_store, _map_whole
from router.publisher.contexts import Contexts
from router.publisher.map_invariants import check_rows
from router.sequence.digest import digest
from router.sequence.hashing import TokenArray

_FEWEST_ROWS = 768
_DEFAULT_POOL_BLOCKS = 1 << 9

_CLEARED_ROWS = 8_192
"""Looked at without a pause: about 0.4 ms."""


class EngineMap:
    """Rows of one rank. `max_rows` bounds them; dead ones make room before anything is refused."""

    __slots__ = (
        "_address",
        "_contexts",
        "_former",
        "_groups",
        "_max_rows",
        "_rows",
        "_slots",
        "_state",
        "_words",
    )

    def __init__(self, contexts: Contexts, max_rows: int, pool_blocks: int | None) -> None:
        self._max_rows = max_rows
        self._contexts = contexts
        self._state: HashArray = np.zeros(_map_rows.STATE_WORDS, np.uint64)
        self._state[_map_rows.SEEDS] = contexts.seeds.ctypes.data
        self._state[_map_rows.USES] = contexts.uses.ctypes.data
        self._state[_map_rows.CONTEXTS] = len(contexts.seeds)
        self._state[_map_rows.POOL_BLOCKS] = pool_blocks or _DEFAULT_POOL_BLOCKS
        self._state[_map_rows.POOL_IS_KNOWN] = pool_blocks is not None
        self._address = int(self._state.ctypes.data)
        self._words = self._state.data  # reads of one word are quicker
        self._groups: dict[int, int] = {0: 0}
        self._begin(min(_FEWEST_ROWS, max_rows))

    @property
    def orphan_blocks(self) -> int:
        """Blocks without a name that have a copy."""
        return self._words[_map_rows.ORPHANS]

    @property
    def dead_blocks(self) -> int:
        """Named blocks without a copy."""
        return self._words[_map_rows.DEAD]

    @property
    def unknown_removals(self) -> int:
        """Removals of blocks we never heard of."""
        return self._words[_map_rows.UNKNOWN_REMOVALS]

    @property
    def over_removals(self) -> int:
        """Removals of blocks from tiers that had no copy."""
        return self._words[_map_rows.OVER_REMOVALS]

    @property
    def uncounted_blocks(self) -> int:
        """Blocks told again where a store never raises a count."""
        return self._words[_map_rows.UNCOUNTED]

    @property
    def is_saturated(self) -> bool:
        """Has a block had more copies than can be counted?"""
        return self._words[_map_rows.SATURATED] > 0

    @property
    def memory_bytes(self) -> int:
        """Memory of rows that were in use at one time, and of slots."""
        return self._words[_map_rows.USED_ROWS] * _map_rows.ROW_WORDS * 8 + self._slots.nbytes

    def __len__(self) -> int:
        return self._words[_map_rows.COUNT]

    def copies(self, tier: Tier) -> int:
        """Copies in a tier, of named blocks and of orphans."""
        return self._words[_map_rows.COPIES + tier]

    def store(
        self,
        hashes: HashArray,
        tokens: TokenArray,
        heads: HashArray,
        block_size: int,
        window: int,
        group: int,
        context: int,
        how: int,
        out: HashArray,
    ) -> int:
        """See `_map_store.store`. NO_ROOM: the limit is reached, or the first event took what room
        there was. O(tokens).
        """
        mixed, blocks = self._mixed(group), len(hashes)
        while True:
            refusal = _map_store.store(
                self._address, hashes, tokens, heads, block_size, window, mixed, context, how, out
            )
            self._follow_moves()
            if refusal != _map_kernel.NO_ROOM or out[4 * blocks + _map_store.DONE]:
                return refusal
            if not self._make_room(int(heads[3]) if len(heads) > 3 else blocks):
                return refusal

    def join(self, hashes: HashArray, group: int, how: int, out: HashArray) -> int:
        """See `_map_kernel.join`. NO_ROOM: the limit is reached. O(blocks)."""
        while True:
            told = _map_kernel.join(self._address, hashes, self._mixed(group), how, out)
            self._follow_moves()
            if told != _map_kernel.NO_ROOM or not self._make_room(len(hashes)):
                return told

    def remove(self, hashes: HashArray, group: int, tier: Tier) -> HashArray:
        """One copy of each is gone from a tier; sequence hashes of those it was the last of."""
        out = np.empty(len(hashes), np.uint64)
        return out[: _map_kernel.remove(self._address, hashes, self._mixed(group), int(tier), out)]

    def clear(self, tier: Tier) -> Iterator[None]:
        """All copies are gone from a tier, slice by slice. O(rows)."""
        row = _map_whole.clear(self._address, int(tier), 0, _CLEARED_ROWS)
        while row:
            yield
            row = _map_whole.clear(self._address, int(tier), row, _CLEARED_ROWS)

    def forget_dead(self, most: int) -> None:
        """Forget the graveyard's oldest rows until at most so many are dead. O(those)."""
        _map_whole.forget_dead(self._address, most)

    def context_of(self, engine_hash: int, group: int) -> int:
        """Number of the context of a named block; -1 for any other."""
        return _map_kernel.context_of(self._address, engine_hash ^ self._mixed(group))

    def paths(self, tier: Tier) -> HashArray:
        """Named blocks of a tier, in paths; shape (3, blocks), see `_map_whole.paths`. O(rows)."""
        room = len(self)
        out = np.empty(3 * room, np.uint64)
        return out.reshape(3, room)[:, : _map_whole.paths(self._address, int(tier), out)]

    def saved(self) -> tuple[HashArray, HashArray]:
        """The state's counts without totals of what happened, and the rows. O(rows)."""
        used = int(self._state[_map_rows.USED_ROWS])
        counts = self._state[_map_rows.USED_ROWS :].copy()
        counts[_map_rows.UNKNOWN_REMOVALS - _map_rows.USED_ROWS] = 0
        counts[_map_rows.OVER_REMOVALS - _map_rows.USED_ROWS] = 0
        counts[_map_rows.UNCOUNTED - _map_rows.USED_ROWS] = 0
        return counts, self._rows.words[: used * _map_rows.ROW_WORDS]

    def load(self, counts: HashArray, rows: HashArray) -> None:
        """Replace all by what was saved. O(rows)."""
        capacity = int(self._state[_map_rows.ROW_CAPACITY])
        self._begin(max(len(rows) // _map_rows.ROW_WORDS, capacity))
        self._rows.words[: len(rows)] = rows
        self._state[_map_rows.USED_ROWS :] = counts
        _map_whole.lay_all(self._address)

    def rows(self) -> npt.NDArray[np.uint64]:
        """Rows in use and free, to be looked at; shape (rows, ROW_WORDS)."""
        return self.saved()[1].reshape(-1, _map_rows.ROW_WORDS)

    def _mixed(self, group: int) -> int:
        mixed = self._groups.get(group)
        if mixed is None:
            mixed = self._groups[group] = digest(np.array([group], np.uint64))
        return mixed

    def _make_room(self, rows: int) -> bool:
        capacity, wanted = int(self._state[_map_rows.ROW_CAPACITY]), len(self) + rows
        if capacity < self._max_rows:
            capacity = min(max(2 * capacity, wanted), self._max_rows)
            self._grow(capacity)
        if wanted > capacity:
            self.forget_dead(max(self.dead_blocks - (wanted - capacity), 0))
        return len(self) + rows <= capacity

    def _begin(self, capacity: int) -> None:
        """Empty, with room for so many rows."""
        self._rows = GrowingWords(capacity * _map_rows.ROW_WORDS, np.uint64)
        self._former: FormerTable[np.uint64] | None = None
        self._state[_map_rows.MOVED] = _map_rows.ALL
        self._state[_map_rows.FORMER_SLOTS] = self._state[_map_rows.FORMER_BITS] = 0
        self._lay_out(capacity)

    def _grow(self, capacity: int) -> None:
        """Rows keep their numbers; slots begin to move."""
        slots = self._slots
        _map_whole.begin_to_move(self._address)
        self._former = FormerTable(slots, 1, 0, int(self._state[_map_rows.START]))
        self._rows.grow(capacity * _map_rows.ROW_WORDS)
        self._lay_out(capacity)

    def _lay_out(self, capacity: int) -> None:
        """Go on with rows for so many, and empty slots of which 3/4 at most will be in use."""
        bits = (-(-4 * capacity // 3) - 1).bit_length()
        self._slots = zeros(1 << bits, np.uint64)
        self._state[_map_rows.ROWS] = self._rows.words.ctypes.data
        self._state[_map_rows.ROW_CAPACITY] = capacity
        self._state[_map_rows.SLOTS] = self._slots.ctypes.data
        self._state[_map_rows.SLOT_BITS] = bits

    def _follow_moves(self) -> None:
        """Give back what the former slots leave behind them."""
        if self._former is None:
            return
        moved = self._words[_map_rows.MOVED]
        if moved == _map_rows.ALL:
            self._former = None
        else:
            self._former.release(self._words[_map_rows.START] + moved)

    def check_invariants(self) -> None:
        """Assert the invariants of `_map_rows`. O(rows)."""
        check_rows(self._state, self.rows(), self._slots, self._former, self._contexts.uses)


assert TIERS == _map_kernel.NO_TIER
