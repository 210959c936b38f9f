"""Which blocks are to be copied where; checked whole before a byte moves, always.

Source: validation of both generations of Dynamo's block manager, whose second checks overlap and
ranges in debug builds only. It costs well under a microsecond a block here.
"""

from collections.abc import Sequence

from msgspec import Struct

from router.block_errors import TransferError


class Copies(Struct, frozen=True):
    """`sources[i]` is copied to `targets[i]`. A source may go to several targets."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.targets)


def checked_copies(
    sources: Sequence[int],
    targets: Sequence[int],
    *,
    source_blocks: int,
    target_blocks: int,
    is_same_memory: bool,
) -> Copies:
    """Copies from a layout of `source_blocks` blocks to one of `target_blocks`. O(copies).

    Raises TransferError for none, for unequal counts, a block out of range, a target that is
    doubled, and in the same memory one that is a source as well.
    """
    if not sources:
        raise TransferError("sources", "none", "at least one block", rule="no_blocks_provided")
    if len(sources) != len(targets):
        counts = f"{len(sources)} sources, {len(targets)} targets"
        raise TransferError("targets", counts, "as many as sources", rule="count_mismatch")
    _check_range("sources", sources, source_blocks)
    distinct = check_distinct("targets", targets, target_blocks)
    if is_same_memory and not distinct.isdisjoint(sources):
        both = min(distinct.intersection(sources))
        reason = f"{both} is a source, too"
        raise TransferError("targets", reason, "blocks that are no source", rule="overlapping")
    return Copies(tuple(sources), tuple(targets))


def check_distinct(field: str, blocks: Sequence[int], count: int) -> set[int]:
    """Blocks of a layout of `count`, each once. Raises TransferError."""
    _check_range(field, blocks, count)
    distinct = set(blocks)
    if len(distinct) < len(blocks):
        doubled = next(block for block in distinct if blocks.count(block) > 1)
        rule = "duplicate_destination_blocks"
        raise TransferError(field, f"{doubled} twice", "each block once", rule=rule)
    return distinct


def _check_range(field: str, blocks: Sequence[int], count: int) -> None:
    odd = next((block for block in blocks if not 0 <= block < count), None)
    if odd is not None:
        raise TransferError(field, f"{odd}", f"0 to {count - 1}", rule="block_out_of_range")
