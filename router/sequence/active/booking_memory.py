"""The memory of the bookings' arrays; `_booking_rows.py` has their layout."""

from typing import Any

import numpy as np
import numpy.typing as npt

from router.runtime.kernels.reserved_memory import GrowingWords
from router.sequence.active._booking_kernel import refill
from router.sequence.active._booking_rows import (
    ADDRESS,
    BOOKING_FIGURES,
    BOOKINGS,
    CAPACITY,
    CHILDREN,
    CHILDREN_TABLE,
    COLUMNS,
    DISCOUNT_MICRO,
    END,
    ENDS,
    ENDS_HERE,
    FIRST_TOKEN_COLUMNS,
    FIRST_TOKEN_SLOT,
    FIRST_TOKENS,
    FIRST_TOKENS_COUNT,
    FIRST_USE,
    FREE,
    FREE_ROWS,
    FREED_PROMPTS,
    KIND_WORDS,
    LIGHT_USES,
    MOST_FIRST_TOKENS,
    NEXT_FREED,
    NEXT_USE,
    NODE,
    NODES,
    PARENT,
    PROMPT,
    PROMPTS,
    REFERENCES,
    REQUESTS_HERE,
    ROOT,
    SLOT,
    SLOT_FIGURES,
    SLOTS,
    START,
    STATE_WORDS,
    USED,
    USED_BY,
    USES,
    USES_TABLE,
    Floats,
    Ints,
)

FIRST_CAPACITY = 1024
"""Rows of each kind. Their memory is allocated page by page, when they are first used."""

_FIGURES = (BOOKING_FIGURES, SLOT_FIGURES)
_TOGETHER = {BOOKINGS: (BOOKINGS, BOOKING_FIGURES), SLOTS: (SLOTS, SLOT_FIGURES)}
_TABLES = {NODES: CHILDREN_TABLE, USES: USES_TABLE}


class BookingMemory:
    """The arrays of one set of bookings, which grow. `state`: the argument of the kernels.

    `hashes`: of each prompt in the trie, whose memory the kernels read. A growth takes about 1 ns
    per KB of rows, and 20 ns per entry of a hash table.
    """

    __slots__ = ("_first_tokens", "_rows", "_tables", "hashes", "state")

    def __init__(self) -> None:
        self.state: Ints = np.zeros(STATE_WORDS, np.int64)
        self._rows = [
            GrowingWords(FIRST_CAPACITY * columns, np.float64 if kind in _FIGURES else np.int64)
            for kind, columns in enumerate(COLUMNS)
        ]
        self._tables = {
            CHILDREN_TABLE: np.zeros(2 * FIRST_CAPACITY, np.int64),
            USES_TABLE: np.zeros(2 * FIRST_CAPACITY, np.int64),
        }
        self.hashes: list[object] = [None] * FIRST_CAPACITY
        for kind in range(len(COLUMNS)):
            self._describe(kind)
        for table in self._tables:
            self._describe_table(table)
        self.state[NODES * KIND_WORDS + USED] = ROOT
        self._first_tokens: Floats = np.zeros((MOST_FIRST_TOKENS, FIRST_TOKEN_COLUMNS))
        self.state[FIRST_TOKENS] = self._first_tokens.ctypes.data

    def rows(self, kind: int) -> npt.NDArray[Any]:
        """Return the rows of a kind, to read until the next growth."""
        return self._rows[kind].words.reshape(-1, COLUMNS[kind])

    def take_first_tokens(self) -> Floats:
        """Return the first tokens since the last call, one per row."""
        taken = self._first_tokens[: self.state[FIRST_TOKENS_COUNT]].copy()
        self.state[FIRST_TOKENS_COUNT] = 0
        return taken

    def drop_first_tokens(self, slot: int) -> None:
        """Drop the first tokens of a slot, which another rank may get. O(first tokens)."""
        kept = self.take_first_tokens()
        kept = kept[kept[:, FIRST_TOKEN_SLOT] != slot]
        self._first_tokens[: len(kept)] = kept
        self.state[FIRST_TOKENS_COUNT] = len(kept)

    def make_room(self, slot: int) -> None:
        """Make room for a booking on this slot that does not fit. O(rows), amortised O(1)."""
        while slot >= self._capacity(SLOTS):
            self._grow(SLOTS)
        full = [kind for kind in (NODES, PROMPTS, BOOKINGS) if self._is_half_full(kind)]
        for kind in (*full, USES):
            self._grow(kind)

    def check_invariants(self) -> None:
        """Assert that nodes, uses and prompts refer to each other as often as they say. O(all)."""
        nodes, uses, prompts = self.rows(NODES), self.rows(USES), self.rows(PROMPTS)
        found = [int(each) for each in self._tables[CHILDREN_TABLE] if each]
        references = dict.fromkeys(self._live(PROMPTS), 0)
        requests: dict[tuple[int, int], int] = {}
        children = dict.fromkeys([ROOT, *found], 0)
        assert sorted(found) == self._live(NODES)[1:]
        for node in found:
            row, parent = nodes[node], int(nodes[node, PARENT])
            assert row[END] > row[START] == nodes[parent, END]
            children[parent] += 1
            references[int(row[PROMPT])] += 1
            use, light = int(row[FIRST_USE]), 0
            while use:
                here = int(uses[use, REQUESTS_HERE])
                requests[node, int(uses[use, SLOT])] = here
                assert uses[use, NODE] == node
                assert here == 1 or (here > 1 and not uses[use, DISCOUNT_MICRO])
                light += bool(uses[use, DISCOUNT_MICRO])
                use = int(uses[use, NEXT_USE])
            assert row[LIGHT_USES] == light
        assert len(requests) == len(self._live(USES)) == np.count_nonzero(self._tables[USES_TABLE])
        self._check_paths(requests, references)
        for node, count in children.items():
            assert nodes[node, CHILDREN] == count
            slots = sum(each == node for each, _ in requests)
            assert node == ROOT or nodes[node, USED_BY] == slots > 0
        freed = {prompt for prompt, count in references.items() if not count}
        assert all(prompts[prompt, REFERENCES] == count for prompt, count in references.items())
        held = {prompt for prompt, hashes in enumerate(self.hashes) if hashes is not None}
        assert held == references.keys()
        assert not freed or self.state[FREED_PROMPTS]

    def _check_paths(
        self, requests: dict[tuple[int, int], int], references: dict[int, int]
    ) -> None:
        """Assert that nodes count the bookings through them; count references to prompts."""
        nodes, bookings = self.rows(NODES), self.rows(BOOKINGS)
        left, ends = dict(requests), dict.fromkeys(self._live(NODES), 0)
        uses, ends_here = self.rows(USES), dict.fromkeys(requests, 0)
        for booking in self._live(BOOKINGS):
            slot, node = int(bookings[booking, 0]), int(bookings[booking, 1])
            references[int(bookings[booking, 2])] += 1
            ends[node] += 1
            if node != ROOT:
                ends_here[node, slot] += 1
            while node != ROOT:
                left[node, slot] -= 1
                node = int(nodes[node, PARENT])
        assert not any(left.values())
        assert all(nodes[node, ENDS] == count for node, count in ends.items())
        for use in self._live(USES):
            assert uses[use, ENDS_HERE] == ends_here[int(uses[use, NODE]), int(uses[use, SLOT])]

    def _live(self, kind: int) -> list[int]:
        """Return the rows of a kind that are in use, in order."""
        at, rows = kind * KIND_WORDS, self.rows(kind)
        free, row = set(), int(self.state[at + FREE])
        while row:
            free.add(row)
            row = int(rows[row, 0])
        assert len(free) == self.state[at + FREE_ROWS]
        return [row for row in range(1, int(self.state[at + USED]) + 1) if row not in free]

    def _is_half_full(self, kind: int) -> bool:
        at = kind * KIND_WORDS
        return bool(2 * (self.state[at + USED] - self.state[at + FREE_ROWS]) > self._capacity(kind))

    def forget(self, prompt: int) -> None:
        """Drop the hashes of a freed prompt, and of those behind it; see `free_prompts`."""
        while prompt:
            self.hashes[prompt] = None
            prompt = int(self.rows(PROMPTS)[prompt, NEXT_FREED])

    def _capacity(self, kind: int) -> int:
        return int(self.state[kind * KIND_WORDS + CAPACITY])

    def _grow(self, kind: int) -> None:
        """Double the rows of a kind, and of the kinds that go with it."""
        rows = 2 * self._capacity(kind)
        for each in _TOGETHER.get(kind, (kind,)):
            self._rows[each].grow(rows * COLUMNS[each])
            self._describe(each)
        if kind == PROMPTS:
            self.hashes += [None] * (rows - len(self.hashes))
        table = _TABLES.get(kind)
        if table is not None:
            entries = self._tables[table]
            self._tables[table] = np.zeros(2 * rows, np.int64)
            self._describe_table(table)
            refill(self.state, entries[entries > 0], kind == NODES)

    def _describe(self, kind: int) -> None:
        words, at = self._rows[kind].words, kind * KIND_WORDS
        self.state[at + ADDRESS] = words.ctypes.data
        self.state[at + CAPACITY] = len(words) // COLUMNS[kind]

    def _describe_table(self, table: int) -> None:
        self.state[table] = self._tables[table].ctypes.data
        self.state[table + 1] = len(self._tables[table]) - 1
