"""Plans of block copies, always validated as a whole, and the outcome of each block.

Plans of block copies, always validated as a whole before any byte is copied.

Source: validation of both generations of Dynamo's block manager, the second of which checks overlap
and ranges in debug builds only. Here it costs well under a microsecond per block.
"""

from collections.abc import Sequence
from enum import StrEnum
from itertools import takewhile

from msgspec import Struct

from worker_agent.transfer.errors import TransferError


class BlockResult(StrEnum):
    """The outcome of one block."""

    DONE = "done"
    """The block was copied."""
    KNOWN = "known"
    """The block was already there."""
    MISSING = "missing"
    """The block is not there."""
    FULL = "full"
    """There is no room for the block."""
    BUSY = "busy"
    """Another worker is writing the block."""
    FAILED = "failed"
    """The storage failed, or did not finish in time."""
    CORRUPT = "corrupt"
    """The bytes differ from those stored."""


ARRIVED = frozenset({BlockResult.DONE, BlockResult.KNOWN})


def leading(outcomes: Sequence[BlockResult]) -> int:
    """Return the number of leading blocks that are at their destination."""
    return sum(1 for _ in takewhile(ARRIVED.__contains__, outcomes))


class Copies(Struct, frozen=True):
    """A validated plan: `sources[i]` is copied to `targets[i]`.

    A source may go to several targets.
    """

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
    """Return a plan between layouts of `source_blocks` and `target_blocks` blocks. O(copies).

    Raises TransferError for an empty plan, unequal counts, a block out of range, a repeated target,
    and, in the same memory, a target that is also a source.
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
    """Return the blocks as a set. Raises TransferError if one is repeated or not below `count`."""
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
