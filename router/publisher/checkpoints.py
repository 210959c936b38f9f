"""Everything a rank holds, in messages that the bus can carry."""

from router.protocol.events import Checkpoint, TierBlocks
from router.protocol.values import HeldState, Identity, Rank, Tier, pack_hashes
from router.publisher.held import HeldBlocks


def checkpoint_of(
    held: HeldBlocks,
    rank: Rank,
    incarnation: int,
    identity: Identity,
    event_id: int,
    state: HeldState,
    part_blocks: int,
) -> list[Checkpoint]:
    """What is held after this event, in parts of so many blocks. O(capacity of what is held)."""
    parts = _parts(held, part_blocks)
    return [
        Checkpoint(
            rank.worker_id,
            rank.dp_rank,
            incarnation,
            identity,
            event_id,
            part,
            len(parts),
            blocks,
            state,
        )
        for part, blocks in enumerate(parts)
    ]


def _parts(held: HeldBlocks, part_blocks: int) -> list[tuple[TierBlocks, ...]]:
    parts: list[list[TierBlocks]] = [[]]
    room = part_blocks
    for tier in Tier:
        hashes = held.held(tier)
        while len(hashes):
            if not room:
                parts.append([])
                room = part_blocks
            parts[-1].append(TierBlocks(tier, pack_hashes(hashes[:room])))
            hashes, room = hashes[room:], room - len(hashes[:room])
    return [tuple(part) for part in parts]
