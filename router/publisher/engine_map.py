"""From an engine's own names to sequence hashes, with a count of copies per tier: one rank's.

    state ──▶ rows   40 bytes a block, for the pool's at first, touched as they fill; grown twofold
          └─▶ slots   4 bytes each, at most 3/4 in use

What the words mean is in `_map_rows`, what happens to them in `_map_kernel`.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.protocol.values import TIERS, HashArray, Tier
from router.publisher import _map_kernel, _map_rows, _map_store, _map_whole
from router.publisher.contexts import Contexts
from router.publisher.map_invariants import check_rows
from router.sequence.digest import digest
from router.sequence.hashing import TokenArray

_FEWEST_ROWS = 768
_DEFAULT_POOL_BLOCKS = 1 << 9

_MOST_EXPECTED_ROWS = 1 << 20
"""What is said of a pool is believed up to here; beyond, its map grows as it fills."""


_LARGE_ROWS = 1 << 16
"""From so many on, room is better prepared beside everything else."""

_AHEAD_ROWS = 1 << 17
"""Rows whose memory the system is made to give beforehand: 5 MB, of which a page may cost 5 ms."""


class Room(NamedTuple):
    """Where the rows and slots of a map lie."""

    rows: HashArray
    slots: npt.NDArray[np.uint32]


class EngineMap:
    """Rows of one rank. `max_rows` bounds them; dead ones make room before anything is refused."""

    __slots__ = (
        "_address",
        "_contexts",
        "_groups",
        "_max_rows",
        "_rows",
        "_slots",
        "_state",
        "_touched_rows",
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
        self._rows: HashArray = np.empty(0, np.uint64)
        expected = min(pool_blocks or 0, _MOST_EXPECTED_ROWS)
        self.move_into(self._laid_out(min(max(expected, _FEWEST_ROWS), max_rows)))
        self._touched_rows = 0

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
            if refusal != _map_kernel.NO_ROOM or out[4 * blocks + _map_store.DONE]:
                return refusal
            if not self._make_room(int(heads[3]) if len(heads) > 3 else blocks):
                return refusal

    def join(self, hashes: HashArray, group: int, how: int, out: HashArray) -> int:
        """See `_map_kernel.join`. NO_ROOM: the limit is reached. O(blocks)."""
        while True:
            told = _map_kernel.join(self._address, hashes, self._mixed(group), how, out)
            if told != _map_kernel.NO_ROOM or not self._make_room(len(hashes)):
                return told

    def remove(self, hashes: HashArray, group: int, tier: Tier) -> HashArray:
        """One copy of each is gone from a tier; sequence hashes of those it was the last of."""
        out = np.empty(len(hashes), np.uint64)
        return out[: _map_kernel.remove(self._address, hashes, self._mixed(group), int(tier), out)]

    def clear(self, tier: Tier) -> None:
        """All copies are gone from a tier. O(rows)."""
        _map_whole.clear(self._address, int(tier))

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
        return counts, self._rows[: used * _map_rows.ROW_WORDS]

    def load(self, counts: HashArray, rows: HashArray) -> None:
        """Replace all by what was saved. O(rows)."""
        capacity = int(self._state[_map_rows.ROW_CAPACITY])
        self.move_into(self._laid_out(max(len(rows) // _map_rows.ROW_WORDS, capacity)))
        self._rows[: len(rows)] = rows
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

    @property
    def is_room_short(self) -> bool:
        """Is it time for `prepared`, so that no store has to wait for memory? O(1)."""
        capacity = self._words[_map_rows.ROW_CAPACITY]
        if capacity < _LARGE_ROWS:
            return False
        is_filling = self._is_filling and capacity < self._max_rows
        is_fresh = self._words[_map_rows.USED_ROWS] + _AHEAD_ROWS // 2 > self._touched_rows
        return is_filling or (is_fresh and self._touched_rows < capacity)

    def prepared(self) -> Room:
        """Room for more, to be moved into; may be done on another thread, while nobody changes the
        map. O(rows).
        """
        capacity, used = (self._words[w] for w in (_map_rows.ROW_CAPACITY, _map_rows.USED_ROWS))
        if self._is_filling and capacity < self._max_rows:
            room = self._laid_out(min(2 * capacity, self._max_rows))
        else:
            room = Room(self._rows, self._slots)
        if not used:
            room.slots[:] = 0
        room.rows[used * _map_rows.ROW_WORDS : (used + _AHEAD_ROWS) * _map_rows.ROW_WORDS] = 0
        return room

    def move_into(self, room: Room) -> None:
        """Go on in what was prepared since the last change. O(1)."""
        self._rows, self._slots = room.rows, room.slots
        self._state[_map_rows.ROWS] = room.rows.ctypes.data
        self._state[_map_rows.ROW_CAPACITY] = len(room.rows) // _map_rows.ROW_WORDS
        self._state[_map_rows.SLOTS] = room.slots.ctypes.data
        self._state[_map_rows.SLOT_BITS] = len(room.slots).bit_length() - 1
        self._touched_rows = self._words[_map_rows.USED_ROWS] + _AHEAD_ROWS

    @property
    def _is_filling(self) -> bool:
        return len(self) > self._words[_map_rows.ROW_CAPACITY] * 7 // 8

    def _make_room(self, rows: int) -> bool:
        capacity, wanted = int(self._state[_map_rows.ROW_CAPACITY]), len(self) + rows
        if capacity < self._max_rows:
            capacity = min(max(2 * capacity, wanted), self._max_rows)
            self.move_into(self._laid_out(capacity))
        if wanted > capacity:
            self.forget_dead(max(self.dead_blocks - (wanted - capacity), 0))
        return len(self) + rows <= capacity

    def _laid_out(self, capacity: int) -> Room:
        """Room for so many rows, with the present ones in it. O(rows)."""
        rows = np.empty(capacity * _map_rows.ROW_WORDS, np.uint64)
        used = int(self._state[_map_rows.USED_ROWS]) * _map_rows.ROW_WORDS
        rows[:used] = self._rows[:used]
        bits = (-(-4 * capacity // 3) - 1).bit_length()  # 3/4 in use at most
        slots = np.zeros(1 << bits, np.uint32)
        state = self._state.copy()
        state[_map_rows.ROWS], state[_map_rows.ROW_CAPACITY] = rows.ctypes.data, capacity
        state[_map_rows.SLOTS], state[_map_rows.SLOT_BITS] = slots.ctypes.data, bits
        _map_whole.lay_all(int(state.ctypes.data))
        return Room(rows, slots)

    def check_invariants(self) -> None:
        """Assert the invariants of `_map_rows`. O(rows)."""
        check_rows(self._state, self.rows(), self._slots, self._contexts.uses)


assert TIERS == _map_kernel.NO_TIER
