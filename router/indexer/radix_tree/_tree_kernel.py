"""The kernels of the radix tree that Python calls.

`address` is the address of the state words that describe the whole tree (`_sets`). A change that
would exceed the reserved memory stops the batch at that key; the kernel returns the number of keys
it has processed.
"""

import numpy as np

from router.indexer.base import DIFFERENT, DONE, REFUSED
from router.indexer.radix_tree._block_table import (
    MISSING,
    Halves,
    Words,
    erase,
    fetch_ahead,
    fetch_first,
    find_position,
    mixed_of,
    place,
    slot_at,
    sub_table_of,
)
from router.indexer.radix_tree._block_table import export as export_pairs
from router.indexer.radix_tree._holder_sets import (
    CHECK_INTERVAL,
    CHECKED,
    CLASS_HOLDER,
    CLASS_TREE,
    CLOSED,
    COUNTS,
    DIFFERED,
    DIGESTS,
    FORCED_OPEN,
    KEEP,
    LAYOUT,
    LEFT_OVER,
    MASK,
    MASK_BITS,
    UNTIL_CHECK,
    VISIBLE,
    Tree,
    alter,
    bits_in,
    exchange,
    known_with_member,
    member_at,
    member_word,
    of_holder,
    position_of,
    size_of,
    tree_at,
    uses_of,
    with_member,
    word_of,
)
from router.indexer.radix_tree._match_kernel import WIDTH, match
from router.indexer.radix_tree._stepwise_kernel import CLASSES, LAYOUT_WORDS
from router.protocol.events import ANY_TIER, CLEARED, REMOVED, STATE_WORDS, STORED
from router.protocol.values import TIERS
from router.runtime.kernels.numba_runtime import device, kernel, words_at
from router.sequence.hashing._digest import mix

_0 = np.uint64(0)
_1 = np.uint64(1)

_CHANGE = "int64(int64, int64, int64, Array(uint64, 1, 'C', readonly=True))"

MALFORMED = -4
"""Outcome of a malformed batch; nothing was changed. `router.indexer.base` has the others."""

PROGRESS_BITS = 32
"""Bits of the second part of a batch's progress. The first part is the offset of the current event,
in words; the second is the number of its blocks that are applied."""

_KIND = np.uint64(255)
_TIER_SHIFT = np.uint64(8)
_ZERO_SHIFT = np.uint64(16)
_BLOCKS_SHIFT = np.uint64(32)


@device
def _store(tree: Tree, holder: np.uint64, tier: np.uint64, keys: Words) -> int:
    """Record that the holder has these blocks in this tier. Returns how many keys are done.

    Consecutive blocks often have the same holders: the last transition from one reference to the
    next is kept, so that a run of such blocks looks it up once.
    """
    bit = _1 << tier
    alone = member_word(holder, bit)
    last_from, last_to = _0, alone
    count, digest, i = _0, _0, 0
    fetch_first(tree.blocks, keys)
    while i < len(keys):
        fetch_ahead(tree.blocks, keys, i)
        slot = place(tree.blocks, keys[i])
        if slot == MISSING:
            break
        reference = tree.blocks.slots[slot + _1]
        if reference != last_from:
            position = position_of(tree, reference, holder)
            old = word_of(tree, reference, position, holder)
            if old & bit:
                i += 1
                continue
            reached = with_member(tree, reference, position, old, alone | old)
            if reached == MISSING:
                break
            last_from, last_to = reference, reached
        if exchange(tree, slot, reference, last_to):
            last_from, last_to = _0, alone
        count += _1
        digest ^= mix(keys[i])
        i += 1
    tree.holders[of_holder(holder, COUNTS + tier)] += count
    tree.holders[of_holder(holder, DIGESTS + tier)] ^= digest
    if count:
        tree.holders[of_holder(holder, CLOSED)] = _0
    return i


@device
def _drop(tree: Tree, mixed: np.uint64, holder: np.uint64, bit: np.uint64) -> int:
    """Remove a holder's block from a tier. Returns 1, 0 if it was not there, REFUSED if full."""
    place_in_sub = find_position(tree.blocks, mixed)
    if place_in_sub == MISSING:
        return 0
    sub = sub_table_of(tree.blocks, mixed)
    slot = slot_at(tree.blocks, sub, place_in_sub)
    reference = tree.blocks.slots[slot + _1]
    if reference == member_word(holder, bit):  # the common case, and the fastest
        erase(tree.blocks, sub, place_in_sub)
        return 1
    position = position_of(tree, reference, holder)
    old = word_of(tree, reference, position, holder)
    if not old & bit:
        return 0
    reached = with_member(tree, reference, position, old, old & ~bit if old & MASK != bit else _0)
    if reached == MISSING:
        return REFUSED
    exchange(tree, slot, reference, reached)
    return 1


@device
def _remove(tree: Tree, holder: np.uint64, tier: np.uint64, keys: Words) -> int:
    """Remove these blocks of the holder from this tier. Returns how many keys are done."""
    count, digest, i = _0, _0, 0
    fetch_first(tree.blocks, keys)
    while i < len(keys):
        fetch_ahead(tree.blocks, keys, i)
        outcome = _drop(tree, mixed_of(tree.blocks, keys[i]), holder, _1 << tier)
        if outcome == REFUSED:
            break
        if outcome:
            count += _1
            digest ^= mix(keys[i])
        i += 1
    tree.holders[of_holder(holder, COUNTS + tier)] -= count
    tree.holders[of_holder(holder, DIGESTS + tier)] ^= digest
    if count:
        tree.holders[of_holder(holder, CLOSED)] = _0
    return i


@device
def _compare(tree: Tree, galloped: Halves, start: np.uint64) -> None:
    """Mark the holder of the row at `start` as having holes if walking found another overlap."""
    for i in range(start, start + WIDTH):
        if galloped[i] != tree.ends[i]:
            holder = np.uint64(tree.ends[start])
            tree.holders[of_holder(holder, FORCED_OPEN)] = MASK
            tree.holders[of_holder(holder, CLOSED)] = _0
            tree.state[DIFFERED] += _1
            return


@device
def _is_well_formed(words: Words, event_count: int, places: int) -> bool:
    """Return whether the events are whole, and of the tiers and the classes that there are."""
    head = STATE_WORDS
    while head < len(words):
        word = words[head]
        kind, tier, blocks = word & _KIND, word >> _TIER_SHIFT & _KIND, word >> _BLOCKS_SHIFT
        is_change = (kind == np.uint64(STORED) or kind == np.uint64(REMOVED)) and tier < places
        may_clear = kind == np.uint64(CLEARED) and blocks == _0
        is_clear = may_clear and (tier < places or tier == np.uint64(ANY_TIER))
        if not (is_change or is_clear) or word >> _ZERO_SHIFT & np.uint64(0xFFFF):
            return False
        head += 1 + int(blocks)
        event_count -= 1
    return head == len(words) and event_count == 0


@kernel(_CHANGE)
def store(address: int, holder: int, tier: int, keys: Words) -> int:
    """Record that the holder has these blocks in this tier. Returns how many keys are done."""
    return _store(tree_at(address), np.uint64(holder), np.uint64(tier), keys)


@kernel(_CHANGE)
def remove(address: int, holder: int, tier: int, keys: Words) -> int:
    """Remove these blocks of the holder from this tier. Returns how many keys are done."""
    return _remove(tree_at(address), np.uint64(holder), np.uint64(tier), keys)


@device
def _settle(tree: Tree, holder: np.uint64, said: Words) -> int:
    """Record the tiers reported free of holes. Returns DONE, or DIFFERENT if the sums differ."""
    row = of_holder(holder, COUNTS)
    closed = _0
    for tier in range(TIERS):
        if said[tier] == _0:
            closed |= _1 << np.uint64(tier)
    is_doubtful = tree.holders[row + FORCED_OPEN] or tree.holders[row + LEFT_OVER]
    tree.holders[row + CLOSED] = _0 if is_doubtful else closed
    for i in range(2 * TIERS):
        if tree.holders[row + np.uint64(i)] != said[TIERS + i]:
            return DIFFERENT
    return DONE


@device
def _places(tree: Tree, holder: np.uint64) -> int:
    """Return the number of tiers and classes that the holder has."""
    address = tree.holders[of_holder(holder, LAYOUT)]
    if address == _0:
        return TIERS
    return TIERS + int(words_at(address, np.uint64(LAYOUT_WORDS))[CLASSES])


@device
def _change(tree: Tree, classes: Tree, holder: np.uint64, event: np.uint64, keys: Words) -> int:
    tier = event >> _TIER_SHIFT & _KIND
    if tier >= np.uint64(TIERS):
        holder = tree.holders[of_holder(holder, CLASS_HOLDER)] - _1
        tree, tier = classes, tier - np.uint64(TIERS)
    if event & _KIND == np.uint64(STORED):
        return _store(tree, holder, tier, keys)
    return _remove(tree, holder, tier, keys)


@device
def _apply(tree: Tree, holder: np.uint64, words: Words, progress: int, room: int) -> int:
    classes = tree_at(int(tree.state[CLASS_TREE])) if tree.state[CLASS_TREE] else tree
    head, done = progress >> PROGRESS_BITS, progress & ((1 << PROGRESS_BITS) - 1)
    while head < len(words) and room > 0:
        if words[head] & _KIND == np.uint64(CLEARED):
            break
        count = int(words[head] >> _BLOCKS_SHIFT)
        part = min(count - done, room)
        keys = words[head + 1 + done : head + 1 + done + part]
        if _change(tree, classes, holder, words[head], keys) < part:
            return REFUSED
        room, done = room - part, done + part
        if done == count:
            head, done = head + 1 + count, 0
    if head < len(words):
        return head << PROGRESS_BITS | done
    return _settle(tree, holder, words)


@kernel("int64(int64, int64, Bytes(uint8, 1, 'C'), int64, int64, int64)")
def apply(
    address: int, holder: int, packed: bytes, event_count: int, progress: int, room: int
) -> int:
    """Apply at most `room` blocks of a packed batch (`router.protocol.events`), from `progress` on.

    Returns the outcome, or the progress reached. Stops before an event that clears something: the
    caller applies that one. Events of classes go to the tree of classes, in which a rank with a
    layout must have a holder; the caller compares their sums.
    """
    if len(packed) % 8:
        return MALFORMED
    words, tree = np.frombuffer(packed, np.uint64), tree_at(address)
    if progress == 0:
        if not _is_well_formed(words, event_count, _places(tree, np.uint64(holder))):
            return MALFORMED
        progress = STATE_WORDS << PROGRESS_BITS
    return _apply(tree, np.uint64(holder), words, progress, room)


@kernel("int64(int64, Array(uint64, 1, 'C', readonly=True))")
def find(address: int, keys: Words) -> int:
    """Write the rows {holder, overlap in each cumulative tier} to `ends`; return their number.

    One in `CHECK_INTERVAL` results is verified by walking over every block. If a holder's
    overlap differs, it has holes although it reported none; from then on it is always walked.
    """
    tree = tree_at(address)
    rows = match(tree, keys, False)
    tree.state[UNTIL_CHECK] -= _1
    if tree.state[UNTIL_CHECK] == _0:
        tree.state[UNTIL_CHECK] = tree.state[CHECK_INTERVAL]
        tree.state[CHECKED] += _1
        galloped = tree.ends[: np.int64(WIDTH) * rows].copy()
        match(tree, keys, True)
        for row in range(rows):
            _compare(tree, galloped, np.uint64(row) * WIDTH)
    return rows


@device
def _strip(tree: Tree, slot: np.uint64) -> bool:
    """Remove from a slot's members the tiers they do not keep. Returns False if there is no room.

    The tiers that a set loses here, it loses at every slot: the set is altered in place for all
    of them, unless an equal set exists already. Nothing is copied, so that a full index can still
    be swept.
    """
    i = _0
    while i < size_of(tree, tree.blocks.slots[slot + _1]):
        reference = tree.blocks.slots[slot + _1]
        word = member_at(tree, reference, i)
        holder = word >> MASK_BITS
        lost = word & MASK & ~tree.holders[of_holder(holder, KEEP)]
        if lost == _0:
            i += _1
            continue
        new, slots = word & ~lost if word & MASK != lost else _0, _1
        reached = known_with_member(tree, reference, i, word, new)
        if reached != MISSING:
            exchange(tree, slot, reference, reached)
        elif alter(tree, reference, i, word, new):
            slots = uses_of(tree, reference)
        else:
            return False
        tree.holders[of_holder(holder, LEFT_OVER)] -= bits_in(lost) * slots
    return True


@kernel("int64(int64, int64)")
def sweep(address: int, sub_table: int) -> int:
    """Remove from one sub-table the tiers that holders do not keep. Returns 0 if it had no room."""
    tree, sub, position = tree_at(address), np.uint64(sub_table), _0
    while position < np.uint64(tree.blocks.capacity[sub]):
        slot = slot_at(tree.blocks, sub, position)
        if tree.blocks.slots[slot + _1] == _0:
            position += _1
        elif not _strip(tree, slot):
            return 0
        elif tree.blocks.slots[slot + _1] == _0:  # the entry that moves here is examined next
            erase(tree.blocks, sub, position)
        else:
            position += _1
    return 1


@device
def _visible(tree: Tree, word: np.uint64) -> np.uint64:
    """Return a member word without the tiers that matching does not see."""
    return word & (~MASK | tree.holders[of_holder(word >> MASK_BITS, VISIBLE)])


@kernel("int64(int64, int64, uint64[:, ::1])")
def export(address: int, sub_table: int, held: Words) -> int:
    """Write the holdings of a sub-table that matching sees, as rows {member word, block}.

    Returns their number; if `held` has no room for one per holder and block, and one more, then
    minus the rows that it needs.
    """
    tree = tree_at(address)
    pairs = export_pairs(tree.blocks, np.uint64(sub_table))
    rows, n = 1, 0
    for i in range(len(pairs)):
        rows += np.int64(size_of(tree, pairs[i, 1]))  # type: ignore[assignment]
    if rows > len(held):
        return -rows
    for i in range(len(pairs)):
        for m in range(size_of(tree, pairs[i, 1])):
            word = _visible(tree, member_at(tree, pairs[i, 1], np.uint64(m)))
            held[n, 0] = word
            held[n, 1] = pairs[i, 0]
            n += int(word & MASK != _0)
    return n
