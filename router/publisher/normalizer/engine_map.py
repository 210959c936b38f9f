"""One rank's map from an engine's own hashes to sequence hashes, with copy counts per tier.

    state ──▶ rows   40 bytes a block, touched as they fill; doubled without being copied
          └─▶ slots   8 bytes each, at most 3/4 in use; doubled, a few are moved with every block

`_map_rows` describes the words, `_map_kernel` and `_map_store` change them.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from router.protocol.values import TIERS, HashArray, Tier
from router.publisher.normalizer import _map_kernel, _map_rows, _map_store, _map_sweep
from router.publisher.normalizer.contexts import Contexts
from router.publisher.normalizer.map_invariants import check_rows
from router.runtime.kernels.growing_table import GrowingTable
from router.runtime.kernels.reserved_memory import GrowingWords, zeros
from router.sequence.hashing._digest import digest
from router.sequence.hashing.block_hashes import TokenArray

_FEWEST_ROWS = 768
_DEFAULT_POOL_BLOCKS = 1 << 9

_CLEARED_ROWS = 8_192
"""The number of rows cleared without a pause: about 0.4 ms."""


class EngineMap:
    """The rows of one rank, at most `max_rows`; dead ones make room before an event is refused."""

    __slots__ = (
        "_address",
        "_contexts",
        "_groups",
        "_max_rows",
        "_rows",
        "_state",
        "_words",
        "slots",
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
        self._words = self._state.data  # Reading single words from it is faster.
        self._groups: dict[int, int] = {0: 0}
        self._begin(min(_FEWEST_ROWS, max_rows))

    @property
    def orphan_blocks(self) -> int:
        """The number of blocks without a name that have a copy."""
        return self._words[_map_rows.ORPHANS]

    @property
    def dead_blocks(self) -> int:
        """The number of named blocks without a copy."""
        return self._words[_map_rows.DEAD]

    @property
    def unknown_removals(self) -> int:
        """The number of removals of unknown blocks."""
        return self._words[_map_rows.UNKNOWN_REMOVALS]

    @property
    def over_removals(self) -> int:
        """The number of removals of blocks from tiers that had no copy."""
        return self._words[_map_rows.OVER_REMOVALS]

    @property
    def uncounted_blocks(self) -> int:
        """The number of blocks stored again in a mode in which a store never raises a count."""
        return self._words[_map_rows.UNCOUNTED]

    @property
    def is_saturated(self) -> bool:
        """True if a block had more copies than can be counted."""
        return self._words[_map_rows.SATURATED] > 0

    def __len__(self) -> int:
        return self._words[_map_rows.COUNT]

    def copies(self, tier: Tier) -> int:
        """Return the number of copies in a tier, of named blocks and of orphans."""
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
        """Store blocks; see `_map_store.store`. O(tokens).

        Returns NO_ROOM if the limit is reached, or if the first events took all the room.
        """
        mixed, blocks = self._mixed(group), len(hashes)
        while True:
            refusal = _map_store.store(
                self._address, hashes, tokens, heads, block_size, window, mixed, context, how, out
            )
            self.slots.follow_moves()
            if refusal != _map_kernel.NO_ROOM or out[4 * blocks + _map_store.DONE]:
                return refusal
            if not self._make_room(int(heads[3]) if len(heads) > 3 else blocks):
                return refusal

    def join(self, hashes: HashArray, group: int, how: int, out: HashArray) -> int:
        """Count blocks without tokens; see `_map_kernel.join`. O(blocks).

        Returns NO_ROOM if the limit is reached.
        """
        while True:
            told = _map_kernel.join(self._address, hashes, self._mixed(group), how, out)
            self.slots.follow_moves()
            if told != _map_kernel.NO_ROOM or not self._make_room(len(hashes)):
                return told

    def remove(self, hashes: HashArray, group: int, tier: Tier) -> HashArray:
        """Remove one copy of each block from a tier.

        Returns the sequence hashes of those of which it was the last copy.
        """
        out = np.empty(len(hashes), np.uint64)
        return out[: _map_kernel.remove(self._address, hashes, self._mixed(group), int(tier), out)]

    def supersede(
        self, hashes: HashArray, local_hashes: HashArray, head: HashArray, group: int
    ) -> tuple[HashArray, HashArray]:
        """Forget blocks whose hashes now name other content; see `_map_kernel.supersede`.

        Returns their sequence hashes, and a mask of the tiers of each.
        """
        out = np.empty((2, len(hashes)), np.uint64)
        gone = _map_kernel.supersede(
            self._address, hashes, local_hashes, head, self._mixed(group), out
        )
        return out[0, :gone], out[1, :gone]

    def clear(self, tier: Tier) -> Iterator[None]:
        """Remove all copies from a tier, in slices. O(rows)."""
        row = _map_sweep.clear(self._address, int(tier), 0, _CLEARED_ROWS)
        while row:
            yield
            row = _map_sweep.clear(self._address, int(tier), row, _CLEARED_ROWS)

    def forget_dead(self, most: int) -> None:
        """Forget the oldest retired rows until at most `most` rows are dead. O(rows forgotten)."""
        _map_sweep.forget_dead(self._address, most)

    def context_of(self, engine_hash: int, group: int) -> int:
        """Return the number of a named block's context, or -1 for any other block."""
        return _map_kernel.context_of(self._address, engine_hash ^ self._mixed(group))

    def look(self, hashes: HashArray, group: int) -> tuple[HashArray, HashArray, HashArray]:
        """Return sequence hashes, whether each is known (1 or 0), and copies on the device.

        O(blocks); nothing changes.
        """
        out = np.empty((3, len(hashes)), np.uint64)
        _map_kernel.look(self._address, hashes, self._mixed(group), out)
        return out[0], out[1], out[2]

    def orphans(self) -> set[int]:
        """Return the engine hashes of the orphans of group 0, and meaningless ones. O(rows)."""
        rows = self.rows()
        flags = rows[:, int(_map_rows.META)] & (_map_rows.IN_USE | _map_rows.NAMED)
        return set(rows[flags == _map_rows.IN_USE, int(_map_rows.KEY)].tolist())

    def paths(self, tier: Tier) -> HashArray:
        """Return the named blocks of a tier, in paths; see `_map_whole.paths`.

        The shape is (3, blocks). O(rows).
        """
        room = len(self)
        out = np.empty(3 * room, np.uint64)
        return out.reshape(3, room)[:, : _map_sweep.paths(self._address, int(tier), out)]

    def saved(self) -> tuple[HashArray, HashArray]:
        """Return the state's counts, with event counters set to 0, and the rows. O(rows)."""
        used = int(self._state[_map_rows.USED_ROWS])
        counts = self._state[_map_rows.USED_ROWS :].copy()
        counts[_map_rows.UNKNOWN_REMOVALS - _map_rows.USED_ROWS] = 0
        counts[_map_rows.OVER_REMOVALS - _map_rows.USED_ROWS] = 0
        counts[_map_rows.UNCOUNTED - _map_rows.USED_ROWS] = 0
        return counts, self._rows.words[: used * _map_rows.ROW_WORDS]

    def load(self, counts: HashArray, rows: HashArray) -> None:
        """Replace everything by a saved state. O(rows)."""
        capacity = int(self._state[_map_rows.ROW_CAPACITY])
        self._begin(max(len(rows) // _map_rows.ROW_WORDS, capacity))
        self._rows.words[: len(rows)] = rows
        self._state[_map_rows.USED_ROWS :] = counts
        _map_sweep.lay_all(self._address)

    def rows(self) -> npt.NDArray[np.uint64]:
        """Return rows in use and free ones, read-only; the shape is (rows, ROW_WORDS)."""
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
        """Initialise an empty map with room for `capacity` rows."""
        self._rows = GrowingWords(capacity * _map_rows.ROW_WORDS, np.uint64)
        self.slots = GrowingTable(self._state, _slots_for(capacity), 1, 0)
        self._follow_rows(capacity)

    def _grow(self, capacity: int) -> None:
        """Enlarge the map: rows keep their numbers, slots begin to move."""
        _map_sweep.grow(self._address)
        self.slots.replace(_slots_for(capacity))
        self._rows.grow(capacity * _map_rows.ROW_WORDS)
        self._follow_rows(capacity)

    def _follow_rows(self, capacity: int) -> None:
        self._state[_map_rows.ROWS] = self._rows.words.ctypes.data
        self._state[_map_rows.ROW_CAPACITY] = capacity

    def check_invariants(self) -> None:
        """Assert the invariants of `_map_rows`. O(rows)."""
        check_rows(self._state, self.rows(), self.slots, self._contexts.uses)


def _slots_for(capacity: int) -> HashArray:
    """Return empty slots of which at most 3/4 will be in use."""
    return zeros(1 << (-(-4 * capacity // 3) - 1).bit_length(), np.uint64)


assert TIERS == _map_kernel.NO_TIER
