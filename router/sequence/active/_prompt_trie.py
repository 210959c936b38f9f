"""The prompts in service, as a trie of runs of blocks with counts of the requests that share them.

    root ─ [system prompt: 40 blocks] ─┬─ [12 blocks]          a prompt ends where a node ends
                                       └─ [3 blocks] ─ [2 …]   a node splits where prompts part

A sequence hash identifies its whole path, so two runs part at the first position where their hashes
differ, which bisection finds. A prompt of any length is therefore added, looked up and removed in
as many steps as it has nodes, usually one to three: booking 512 blocks costs as much as booking
one.

All counts are per slot (`RankTable`): a block counts once for a slot, however many of its requests
hold it; a block that a single request of a slot holds may weigh less than a whole block.
"""

import numpy as np

from router.runtime.kernels.numba_runtime import device
from router.sequence.active._booking_rows import (
    CHILD,
    CHILDREN,
    DISCOUNT_MICRO,
    END,
    ENDS,
    ENDS_HERE,
    FIRST_HASH,
    FIRST_USE,
    FREED_PROMPTS,
    LIGHT_USES,
    NEXT_FREED,
    NEXT_SIBLING,
    NEXT_USE,
    NODE,
    NODES,
    PARENT,
    PROMPT,
    PROMPTS,
    REFERENCES,
    REQUESTS_HERE,
    ROOT,
    SHARED_BLOCKS,
    SLOT,
    SLOT_DISCOUNT_MICRO,
    START,
    USED_BY,
    USES,
    Ints,
    Trie,
    Words,
    erase,
    find,
    free_rows,
    give_row,
    hash_at,
    put,
    take_row,
)

# ── Nodes ────────────────────────────────────────────────────────────────────────────────────────


@device
def shared_way(trie: Trie, hashes: Words) -> tuple[int, int]:
    """Return the last node that shares a block with a prompt, and the end of the shared part.

    It is the root, and 0, if there is none.
    """
    node, position = ROOT, 0
    while position == trie.nodes[node, END] and position < len(hashes):
        child = find(trie.children, int(np.int64(hashes[position])), node)
        if not child:
            break
        node = child
        position = _shared_end(trie, node, hashes)
    return node, position


@device
def _shared_end(trie: Trie, node: int, hashes: Words) -> int:
    """Return the end of a prompt's shared part of a node's run. Its first block must be shared."""
    prompt = trie.nodes[node, PROMPT]
    low, high = trie.nodes[node, START] + 1, min(trie.nodes[node, END], len(hashes))
    if hash_at(trie, prompt, high - 1) == np.int64(hashes[high - 1]):
        return int(high)
    while low < high:
        middle = (low + high) // 2
        if hash_at(trie, prompt, middle) == np.int64(hashes[middle]):
            low = middle + 1
        else:
            high = middle
    return int(low)


@device
def begun_with(trie: Trie, slot: int, node: int, position: int) -> int:
    """Return the end of the longest booked prompt of a slot that a prompt begins with.

    `node`, `position`: the prompt's shared way. 0: there is none. O(nodes on its path).
    """
    while node != ROOT:
        if position == trie.nodes[node, END]:
            use = find(trie.places, node, slot)
            if use and trie.uses[use, ENDS_HERE]:
                return position
        position, node = trie.nodes[node, START], trie.nodes[node, PARENT]
    return 0


@device
def depth_of(trie: Trie, node: int) -> int:
    """Return the number of nodes above and including a node, without the root."""
    depth = 0
    while node != ROOT:
        depth += 1
        node = trie.nodes[node, PARENT]
    return depth


@device
def _link(rows: Ints, following: int, row: int, owner: Ints, first: int) -> None:
    """Put a row before the others of a list, which begins at `owner[first]`.

    `following`: the column of the next row; that of the one before comes next.
    """
    behind = owner[first]
    rows[row, following], rows[row, following + 1] = behind, 0
    if behind:
        rows[behind, following + 1] = row
    owner[first] = row


@device
def _unlink(rows: Ints, following: int, row: int, owner: Ints, first: int) -> None:
    """Remove a row from a list; see `_link`."""
    behind, before = rows[row, following], rows[row, following + 1]
    if before:
        rows[before, following] = behind
    else:
        owner[first] = behind
    if behind:
        rows[behind, following + 1] = before


@device
def _adopt(trie: Trie, parent: int, child: int) -> None:
    """Add a node to its parent's children; it is in the hash table afterwards."""
    trie.nodes[child, PARENT] = parent
    _link(trie.nodes, NEXT_SIBLING, child, trie.nodes[parent], CHILD)
    trie.nodes[parent, CHILDREN] += 1
    put(trie.children, child)


@device
def _disown(trie: Trie, child: int) -> None:
    """Remove a node from its parent's children, and from the hash table."""
    erase(trie.children, child)
    parent = trie.nodes[child, PARENT]
    _unlink(trie.nodes, NEXT_SIBLING, child, trie.nodes[parent], CHILD)
    trie.nodes[parent, CHILDREN] -= 1


@device
def _new_node(trie: Trie, parent: int, prompt: int, start: int, end: int) -> int:
    node = take_row(trie.state, NODES, trie.nodes)
    trie.nodes[node, START] = start
    trie.nodes[node, END] = end
    trie.nodes[node, PROMPT] = prompt
    trie.nodes[node, FIRST_HASH] = hash_at(trie, prompt, start)
    trie.prompts[prompt, REFERENCES] += 1
    _adopt(trie, parent, node)
    return node


@device
def release_prompt(trie: Trie, prompt: int) -> None:
    """Drop a reference to a prompt. One without references is freed by `free_prompts`."""
    trie.prompts[prompt, REFERENCES] -= 1
    if trie.prompts[prompt, REFERENCES] == 0:
        trie.prompts[prompt, NEXT_FREED] = trie.state[FREED_PROMPTS]
        trie.state[FREED_PROMPTS] = prompt


@device
def free_prompts(trie: Trie) -> tuple[int, int]:
    """Free the rows of prompts without references.

    Returns the first two; the others follow by NEXT_FREED until a row is taken.
    """
    first = prompt = trie.state[FREED_PROMPTS]
    while prompt:
        give_row(trie.state, PROMPTS, trie.prompts, prompt)
        prompt = trie.prompts[prompt, NEXT_FREED]
    trie.state[FREED_PROMPTS] = 0
    return first, trie.prompts[first, NEXT_FREED] if first else 0


@device
def _drop_node(trie: Trie, node: int) -> None:
    _disown(trie, node)
    use = trie.nodes[node, FIRST_USE]
    while use:
        behind = trie.uses[use, NEXT_USE]
        erase(trie.places, use)
        give_row(trie.state, USES, trie.uses, use)
        use = behind
    release_prompt(trie, trie.nodes[node, PROMPT])
    give_row(trie.state, NODES, trie.nodes, node)


@device
def _split(trie: Trie, lower: int, position: int) -> int:
    """Split a node in two; return the upper one. The row itself becomes the lower one.

    Requests refer to the nodes where they end, which is why it stays the lower one.
    """
    start, prompt = trie.nodes[lower, START], trie.nodes[lower, PROMPT]
    parent = trie.nodes[lower, PARENT]
    _disown(trie, lower)
    upper = _new_node(trie, parent, prompt, start, position)
    use = trie.nodes[lower, FIRST_USE]
    while use:
        copy = _new_use(trie, upper, trie.uses[use, SLOT])
        trie.uses[copy, REQUESTS_HERE] = trie.uses[use, REQUESTS_HERE]
        trie.uses[copy, DISCOUNT_MICRO] = trie.uses[use, DISCOUNT_MICRO]
        use = trie.uses[use, NEXT_USE]
    trie.nodes[upper, LIGHT_USES] = trie.nodes[lower, LIGHT_USES]
    trie.nodes[lower, START] = position
    trie.nodes[lower, FIRST_HASH] = hash_at(trie, prompt, position)
    _adopt(trie, upper, lower)
    return upper


@device
def _tidy(trie: Trie, end: int) -> None:
    """Drop the nodes of a path that no request needs, and merge those that need not be two."""
    node = end
    while node != ROOT:
        parent = trie.nodes[node, PARENT]
        if not trie.nodes[node, USED_BY]:
            _drop_node(trie, node)
        elif not trie.nodes[node, ENDS] and trie.nodes[node, CHILDREN] == 1:
            child = trie.nodes[node, CHILD]
            if _weigh_equally(trie, node, child):
                start, first_hash = trie.nodes[node, START], trie.nodes[node, FIRST_HASH]
                _disown(trie, child)
                _drop_node(trie, node)
                trie.nodes[child, START], trie.nodes[child, FIRST_HASH] = start, first_hash
                _adopt(trie, parent, child)
        node = parent


@device
def _weigh_equally(trie: Trie, node: int, child: int) -> bool:
    """Return whether the slots' discounts are equal in a node and in its only child."""
    if not trie.nodes[node, LIGHT_USES] and not trie.nodes[child, LIGHT_USES]:
        return True
    use = trie.nodes[child, FIRST_USE]
    while use:
        above = find(trie.places, node, trie.uses[use, SLOT])
        if trie.uses[above, DISCOUNT_MICRO] != trie.uses[use, DISCOUNT_MICRO]:
            return False
        use = trie.uses[use, NEXT_USE]
    return True


# ── Uses of nodes by slots ───────────────────────────────────────────────────────────────────────


@device
def _new_use(trie: Trie, node: int, slot: int) -> int:
    use = take_row(trie.state, USES, trie.uses)
    trie.uses[use, NODE] = node
    trie.uses[use, SLOT] = slot
    _link(trie.uses, NEXT_USE, use, trie.nodes[node], FIRST_USE)
    trie.nodes[node, USED_BY] += 1
    put(trie.places, use)
    return use


@device
def _drop_use(trie: Trie, use: int) -> None:
    erase(trie.places, use)
    node = trie.uses[use, NODE]
    _unlink(trie.uses, NEXT_USE, use, trie.nodes[node], FIRST_USE)
    trie.nodes[node, USED_BY] -= 1
    give_row(trie.state, USES, trie.uses, use)


@device
def _discount(trie: Trie, use: int, discount_micro: int) -> None:
    """Set the discount of each block of a use."""
    node, slot = trie.uses[use, NODE], trie.uses[use, SLOT]
    before = trie.uses[use, DISCOUNT_MICRO]
    blocks = trie.nodes[node, END] - trie.nodes[node, START]
    trie.slots[slot, SLOT_DISCOUNT_MICRO] += blocks * (discount_micro - before)
    trie.nodes[node, LIGHT_USES] += int(discount_micro != 0) - int(before != 0)
    trie.uses[use, DISCOUNT_MICRO] = discount_micro


# ── Prompts ──────────────────────────────────────────────────────────────────────────────────────


@device
def has_room(trie: Trie, node: int, position: int) -> bool:
    """Return whether a prompt that leaves the trie there can be added: rows, and free places."""
    uses = depth_of(trie, node) + 2
    if position < trie.nodes[node, END]:
        uses += trie.nodes[node, USED_BY]
    return free_rows(trie.state, NODES) >= 2 and free_rows(trie.state, USES) >= uses


@device
def add_prompt(trie: Trie, slot: int, prompt: int, length: int, node: int, position: int) -> int:
    """Add a prompt of a slot that leaves the trie there; return its last node.

    O(nodes on its path).
    """
    if position < trie.nodes[node, END]:
        node = _split(trie, node, position)
    if position < length:
        node = _new_node(trie, node, prompt, position, length)
    trie.nodes[node, ENDS] += 1
    end, was_light = node, False
    while node != ROOT:
        use = find(trie.places, node, slot)
        if not use:
            use = _new_use(trie, node, slot)
            trie.slots[slot, SHARED_BLOCKS] += trie.nodes[node, END] - trie.nodes[node, START]
        elif trie.uses[use, DISCOUNT_MICRO]:
            _discount(trie, use, 0)
            was_light = True
        trie.uses[use, REQUESTS_HERE] += 1
        trie.uses[use, ENDS_HERE] += node == end
        node = trie.nodes[node, PARENT]
    if was_light:  # runs may be split for their weights alone
        _tidy(trie, end)
    return int(end)


@device
def remove_prompt(trie: Trie, slot: int, end: int) -> None:
    """Remove a prompt of a slot that ends at a node. O(nodes on its path)."""
    trie.nodes[end, ENDS] -= 1
    node = end
    while node != ROOT:
        use = find(trie.places, node, slot)
        trie.uses[use, REQUESTS_HERE] -= 1
        trie.uses[use, ENDS_HERE] -= node == end
        if not trie.uses[use, REQUESTS_HERE]:
            _discount(trie, use, 0)
            _drop_use(trie, use)
            trie.slots[slot, SHARED_BLOCKS] -= trie.nodes[node, END] - trie.nodes[node, START]
        node = trie.nodes[node, PARENT]
    _tidy(trie, end)


@device
def weigh_prompt(trie: Trie, slot: int, end: int, discount_micro: int) -> None:
    """Set the discount of every block that a request alone holds.

    A prompt's shared blocks come first on its path, so only the end of the path is weighed.
    """
    node = end
    while node != ROOT:
        use = find(trie.places, node, slot)
        if trie.uses[use, REQUESTS_HERE] != 1:
            break
        _discount(trie, use, discount_micro)
        node = trie.nodes[node, PARENT]
    _tidy(trie, end)
