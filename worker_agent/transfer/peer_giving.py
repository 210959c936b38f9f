"""Blocks given to another worker: their bytes, or, on one host, the memory they lie in."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct
from xxhash import xxh3_64_intdigest

from router.blockset_errors import PeerError
from worker_agent.blocks.pool import BlockPool
from worker_agent.transfer.peer_messages import Mapped, Sent, Taken
from worker_agent.transfer.peer_wire import Line
from worker_agent.transfer.window import Window

CHECK_EVERY = 8
"""Of so many blocks in shared memory one is checked."""


def no_proof(_block: int, _identity: bytes) -> int | None:
    """Nobody noted one."""
    return None


class SharedSet(Struct, frozen=True):
    """Blocks that others may have: their pool, which threads share, and their bytes.

    `path`: of the file that the memory is, where it is one. Whoever is on this host and knows the
    token may map it, to read. `proof`: the checksum that a block had when it was stored under a
    name, where somebody noted it.
    """

    pool: BlockPool
    window: Window
    path: Path | None = None
    proof: Callable[[int, bytes], int | None] = no_proof

    @property
    def can_be_mapped(self) -> bool:
        """Whether the memory is a file, and every block one piece of it."""
        return self.path is not None and self.window.is_in_one_piece


class Giving(Struct, frozen=True):
    """Blocks to be given; `missing`: places in the request that none is for. `proofs`: the checksum
    of each that is known.
    """

    set_idx: int
    shared: SharedSet
    blocks: Sequence[int]
    missing: list[int]
    proofs: Sequence[int | None]

    @property
    def can_be_mapped(self) -> bool:
        """Whether the other worker can read them where they lie."""
        return self.shared.can_be_mapped


class Part(Struct, frozen=True):
    """Blocks of one set, and the places in a request that they are for."""

    set_idx: int
    shared: SharedSet
    places: list[int]
    blocks: list[int]
    proofs: list[int | None]


def held_by_name(
    identities: Sequence[bytes], sets: Mapping[int, SharedSet], held: ExitStack
) -> tuple[list[Part], list[int]]:
    """Blocks by what they hold, each in the first set that has it, in use until `held` ends; and
    the places that nobody has.
    """
    parts: list[Part] = []
    left = list(range(len(identities)))
    for index, shared in sets.items():
        blocks = shared.pool.hold([identities[place] for place in left])
        found = [(p, block) for p, block in zip(left, blocks, strict=True) if block is not None]
        left = [place for place, block in zip(left, blocks, strict=True) if block is None]
        if found:
            at, blocks_there = [each[0] for each in found], [each[1] for each in found]
            held.callback(shared.pool.release, blocks_there)
            proofs = [shared.proof(block, identities[place]) for place, block in found]
            parts.append(Part(index, shared, at, blocks_there, proofs))
    return parts, left


def give_scattered(line: Line, parts: Sequence[Part], missing: list[int]) -> None:
    """Of several sets, or none, over the socket. Raises PeerError."""
    views: dict[int, tuple[memoryview, int | None]] = {}
    for part in parts:
        proven = zip(part.shared.window.outgoing(part.blocks), part.proofs, strict=True)
        views |= zip(part.places, proven, strict=True)
    block_bytes = parts[0].shared.window.block_bytes if parts else 0
    line.send(Sent(missing, block_bytes))
    in_order = [views[place] for place in sorted(views)]
    line.send_blocks([view for view, _ in in_order], [proof for _, proof in in_order])


def give_bytes(line: Line, giving: Giving) -> None:
    """Over the socket. Raises PeerError."""
    window = giving.shared.window
    line.send(Sent(giving.missing, window.block_bytes))
    line.send_blocks(window.outgoing(giving.blocks), giving.proofs)


def give_mapped(line: Line, giving: Giving, handed_over: set[int]) -> None:
    """Where they lie; returns when the other worker has them. Raises PeerError."""
    window, has_file = giving.shared.window, giving.set_idx not in handed_over
    checked = range(0, len(giving.blocks), CHECK_EVERY)
    checks = {place: _checksum(giving, place) for place in checked}
    sizes = window.block_bytes, giving.set_idx, window.memory_bytes
    offsets = window.offsets(giving.blocks)
    line.send(Mapped(giving.missing, *sizes, offsets, checks, has_file))
    if has_file:
        _hand_over(line, giving.shared)
        handed_over.add(giving.set_idx)
    line.receive(Taken)


def _checksum(giving: Giving, place: int) -> int:
    proof = giving.proofs[place]
    if proof is not None:
        return proof
    [view] = giving.shared.window.outgoing([giving.blocks[place]])
    return xxh3_64_intdigest(view)


def _hand_over(line: Line, shared: SharedSet) -> None:
    assert shared.path is not None
    try:
        descriptor = os.open(shared.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise PeerError(line.address, f"{shared.path}: {error.strerror}") from error
    try:
        line.send_file(descriptor)
    finally:
        os.close(descriptor)
