"""The arrays of the bookings: rows, free rows, and the two hash tables of the prompt trie.

Nodes, uses of a node by a slot, prompts and bookings are rows of arrays, numbered from 1; 0 is
none. Slots are numbered as in the rank table. One hash table finds the child of a node by its first
hash, the other the use of a node by a slot. `booking_memory.py` owns the memory.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.runtime.kernels.numba_runtime import device, int_rows_at, words_at

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]

MICRO = 1_000_000
"""The weight of a whole block. Weights are in millionths, so that sums stay exact."""

ROOT = 1

# Kinds of rows. The state has for each kind: address, capacity, rows ever used, first free row, and
# the number of free rows; then for each hash table: address, and capacity − 1.
NODES, USES, PROMPTS, BOOKINGS, BOOKING_FIGURES, SLOTS, SLOT_FIGURES = 0, 1, 2, 3, 4, 5, 6
KINDS = 7
ADDRESS, CAPACITY, USED, FREE, FREE_ROWS = 0, 1, 2, 3, 4
KIND_WORDS = 5
CHILDREN_TABLE = KINDS * KIND_WORDS
USES_TABLE = CHILDREN_TABLE + 2
FREED_PROMPTS = USES_TABLE + 2  # the first of the prompts that no row refers to any more
OLDEST = FREED_PROMPTS + 1  # the reservation that expires first, and the one that expires last
NEWEST = FREED_PROMPTS + 2
GROWING = FREED_PROMPTS + 3  # the number of requests reported in batches
FIRST_TOKENS = FREED_PROMPTS + 4  # the address of the first tokens not taken yet, and their number
FIRST_TOKENS_COUNT = FREED_PROMPTS + 5
STATE_WORDS = FREED_PROMPTS + 6

# Columns of a node: a run of blocks, positions [START, END) of the hashes of PROMPT.
PARENT, START, END, PROMPT, FIRST_HASH = 0, 1, 2, 3, 4
ENDS = 5  # requests of any slot that end here
CHILDREN, CHILD, NEXT_SIBLING, PREVIOUS_SIBLING = 6, 7, 8, 9
USED_BY, FIRST_USE = 10, 11  # number of slots with requests through it, and the first of the uses
LIGHT_USES = 12  # uses with weighed blocks
NODE_COLUMNS = 13

# Columns of a use of a node by a slot.
NODE, SLOT, REQUESTS_HERE = 0, 1, 2
DISCOUNT_MICRO = 3  # subtracted from each block, if one request of the slot holds it
NEXT_USE, PREVIOUS_USE = 4, 5
ENDS_HERE = 6  # requests of the slot that end there
USE_COLUMNS = 7

# Columns of a prompt: the address of its hashes, and the number of nodes and bookings with it.
HASHES, REFERENCES, NEXT_FREED = 0, 1, 2
PROMPT_COLUMNS = 3

# The first columns of a slot. `_booking_kernel.py` names the others, and those of bookings.
SHARED_BLOCKS, SLOT_DISCOUNT_MICRO = 0, 1
SLOT_COLUMNS = 13
SLOT_FIGURES_COLUMNS = 9
BOOKING_COLUMNS = 19
BOOKING_FIGURES_COLUMNS = 8

# Columns of a first token: its slot, the time since the booking, the tokens computed until then and
# their attention work, and the requests that decoded beside it, with their tokens.
FIRST_TOKEN_SLOT, WAITED_S, FIRST_TOKEN_TOKENS, FIRST_TOKEN_CONTEXTS = 0, 1, 2, 3
BESIDE_REQUESTS, BESIDE_TOKENS = 4, 5
FIRST_TOKEN_COLUMNS = 6
MOST_FIRST_TOKENS = 512
"""The limit of first tokens between two calls that take them; further ones are not kept."""

COLUMNS = (
    NODE_COLUMNS,
    USE_COLUMNS,
    PROMPT_COLUMNS,
    BOOKING_COLUMNS,
    BOOKING_FIGURES_COLUMNS,
    SLOT_COLUMNS,
    SLOT_FIGURES_COLUMNS,
)
"""The columns of each kind."""

_TO_NEXT = 0
"""The column that links free rows."""


class Index(NamedTuple):
    """A hash table of rows, by two of their columns: `entries` are rows, or 0."""

    entries: Ints
    rows: Ints
    first: int
    second: int


class Trie(NamedTuple):
    """The arrays, as kernels access them."""

    state: Ints
    nodes: Ints
    uses: Ints
    prompts: Ints
    slots: Ints
    children: Index
    places: Index


@device
def trie_at(state: Ints) -> Trie:
    """Return the arrays that a state describes."""
    nodes, uses = rows_of(state, NODES, NODE_COLUMNS), rows_of(state, USES, USE_COLUMNS)
    return Trie(
        state,
        nodes,
        uses,
        rows_of(state, PROMPTS, PROMPT_COLUMNS),
        rows_of(state, SLOTS, SLOT_COLUMNS),
        Index(_entries(state, CHILDREN_TABLE), nodes, FIRST_HASH, PARENT),
        Index(_entries(state, USES_TABLE), uses, NODE, SLOT),
    )


@device
def _entries(state: Ints, table: int) -> Ints:
    entries: Ints = int_rows_at(state[table], 1, state[table + 1] + 1)[0]
    return entries


@device
def rows_of(state: Ints, kind: int, columns: int) -> Ints:
    """Return the rows of a kind."""
    at = kind * KIND_WORDS
    return int_rows_at(state[at + ADDRESS], state[at + CAPACITY], columns)


@device
def free_rows(state: Ints, kind: int) -> int:
    """Return the number of rows that can still be taken."""
    at = kind * KIND_WORDS
    return int(state[at + FREE_ROWS] + state[at + CAPACITY] - 1 - state[at + USED])


@device
def take_row(state: Ints, kind: int, rows: Ints) -> int:
    """Return a free row, all zeros."""
    at = kind * KIND_WORDS
    row = state[at + FREE]
    if row:
        state[at + FREE] = rows[row, _TO_NEXT]
        state[at + FREE_ROWS] -= 1
        rows[row] = 0
        return int(row)
    state[at + USED] += 1
    return int(state[at + USED])


@device
def give_row(state: Ints, kind: int, rows: Ints, row: int) -> None:
    """Free a row."""
    at = kind * KIND_WORDS
    rows[row, _TO_NEXT] = state[at + FREE]
    state[at + FREE] = row
    state[at + FREE_ROWS] += 1


@device
def hash_at(trie: Trie, prompt: int, position: int) -> int:
    """Return the hash at a position of a prompt, as i64."""
    address = np.uint64(trie.prompts[prompt, HASHES] + 8 * position)
    return int(np.int64(words_at(address, np.uint64(1))[0]))


# ── Hash tables: linear probing; erasing shifts the following entries back ───────────────────────


@device
def _home(first: int, second: int, last: int) -> int:
    spread = np.uint64(first) * np.uint64(0x9E3779B97F4A7C15)
    spread ^= (np.uint64(second) + (spread >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    spread = (spread ^ (spread >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
    return int(np.int64(spread >> np.uint64(33)) & last)


@device
def _home_of(index: Index, row: int) -> int:
    columns = index.rows[row]
    return _home(columns[index.first], columns[index.second], len(index.entries) - 1)


@device
def find(index: Index, first: int, second: int) -> int:
    """Return the row with this key, or 0."""
    last = len(index.entries) - 1
    position = _home(first, second, last)
    while index.entries[position]:
        row = index.entries[position]
        if index.rows[row, index.first] == first and index.rows[row, index.second] == second:
            return int(row)
        position = (position + 1) & last
    return 0


@device
def put(index: Index, row: int) -> None:
    """Store a row by its key."""
    last, position = len(index.entries) - 1, _home_of(index, row)
    while index.entries[position]:
        position = (position + 1) & last
    index.entries[position] = row


@device
def erase(index: Index, row: int) -> None:
    """Erase a row, which is stored."""
    last, gap = len(index.entries) - 1, _home_of(index, row)
    while index.entries[gap] != row:
        gap = (gap + 1) & last
    position = gap
    while True:
        position = (position + 1) & last
        behind = index.entries[position]
        if not behind:
            break
        if (position - _home_of(index, behind)) & last >= (position - gap) & last:
            index.entries[gap] = behind
            gap = position
    index.entries[gap] = 0
