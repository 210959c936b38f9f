"""Sets of blocks that other workers may read, the blocks of a request among them, and their ways.

give_mapped     on one host: the file of the set, which the peer maps
give_readable   addresses in registered memory, which the peer reads through NIXL
give_bytes      over the socket
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from xxhash import xxh3_64_intdigest

from router.runtime.own_files import open_own
from worker_agent.blocks.pool import BlockPool
from worker_agent.sharing.errors import BlocksetError, PeerError
from worker_agent.sharing.nixl_memory import POLL_S
from worker_agent.sharing.peer_messages import Mapped, Readable, Sent, Taken
from worker_agent.sharing.peer_wire import Line
from worker_agent.transfer.block_window import BlockWindow

T = TypeVar("T")

CHECK_EVERY = 8
"""In shared memory, one of this many blocks is verified."""


def no_proof(_block: int, _identity: bytes) -> int | None:
    """Return None: no checksum is recorded."""
    return None


class SharedSet(Struct, frozen=True):
    """Blocks that other workers may read: their pool, shared by threads, and their bytes.

    `path`: the file that backs the memory, or None. A process on this host that knows the token may
    map it for reading. `proof`: returns the checksum that was recorded when the block was stored
    under an identity, or None.
    """

    pool: BlockPool
    window: BlockWindow
    path: Path | None = None
    proof: Callable[[int, bytes], int | None] = no_proof

    @property
    def can_be_mapped(self) -> bool:
        """True if a file backs the memory and every block is contiguous."""
        return self.path is not None and self.window.is_in_one_piece


class Part(Struct, frozen=True):
    """Blocks of one set to be sent, and their places in the request.

    `proofs`: the checksum of each block, or None if it is not known.
    """

    set_idx: int
    shared: SharedSet
    places: Sequence[int]
    blocks: Sequence[int]
    proofs: Sequence[int | None]


def held_by_name(
    identities: Sequence[bytes], sets: Mapping[int, SharedSet], held: ExitStack
) -> tuple[list[Part], list[int]]:
    """Find blocks by identity, each in the first set that has it, and hold them until `held` ends.

    Returns the blocks by set, and the places that no set has.
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


def _in_order(parts: Sequence[Part], of_parts: Iterable[Iterable[T]]) -> list[T]:
    """Return values of each part's blocks in the order of the request."""
    placed: dict[int, T] = {}
    for part, values in zip(parts, of_parts, strict=True):
        placed |= zip(part.places, values, strict=True)
    return [placed[place] for place in sorted(placed)]


def _proven(parts: Sequence[Part]) -> tuple[list[memoryview], list[int | None]]:
    """Return the bytes and checksums of blocks in the order of the request."""
    views = _in_order(parts, (part.shared.window.outgoing(part.blocks) for part in parts))
    return views, _in_order(parts, (part.proofs for part in parts))


def give_bytes(line: Line, parts: Sequence[Part], missing: list[int]) -> None:
    """Send blocks over the socket. Raises PeerError."""
    line.send(Sent(missing, parts[0].shared.window.block_bytes if parts else 0))
    line.send_blocks(*_proven(parts))


def give_readable(
    line: Line,
    parts: Sequence[Part],
    missing: list[int],
    metadata: bytes,
    progress: Callable[[], None],
) -> None:
    """Send the addresses and proofs of blocks; return when the peer has read them.

    `metadata`: of our NIXL agent; empty if the peer has it. `progress`: does our part of its reads.
    Raises PeerError.
    """
    addresses = _in_order(parts, (part.shared.window.addresses(part.blocks) for part in parts))
    line.send(Readable(missing, parts[0].shared.window.block_bytes, addresses, metadata))
    for view, proof in zip(*_proven(parts), strict=True):
        line.send_proof(view, proof)
        progress()
    while not line.has_input and time.monotonic() < line.until_s:
        progress()
        time.sleep(POLL_S)
    line.receive(Taken)


class HandedOver(Struct):
    """The files and metadata that a connection has carried already.

    `sets`: those of which the client has the file. `has_metadata`: of our NIXL agent.
    """

    sets: set[int] = set()
    has_metadata: bool = False


def give_mapped(line: Line, part: Part, missing: list[int], handed_over: set[int]) -> None:
    """Send the location of the blocks; return when the peer has copied them. Raises PeerError."""
    window, has_file = part.shared.window, part.set_idx not in handed_over
    checks = {n: _checksum(part, n) for n in range(0, len(part.blocks), CHECK_EVERY)}
    sizes = window.block_bytes, part.set_idx, window.memory_bytes
    line.send(Mapped(missing, *sizes, window.offsets(part.blocks), checks, has_file))
    if has_file:
        _hand_over(line, part.shared)
        handed_over.add(part.set_idx)
    line.receive(Taken)


def _checksum(part: Part, number: int) -> int:
    proof = part.proofs[number]
    if proof is not None:
        return proof
    [view] = part.shared.window.outgoing([part.blocks[number]])
    return xxh3_64_intdigest(view)


def leased_proofs(
    shared: SharedSet, blocks: Sequence[int], identities: Sequence[bytes]
) -> list[int | None]:
    """Return the checksums of leased blocks, as far as their identities are given.

    Raises BlocksetError if they have other content.
    """
    if not identities:
        return [None] * len(blocks)
    if shared.pool.scan(identities) != list(blocks):
        allowed = "those of the leased blocks, in their order"
        raise BlocksetError("identities", "of other blocks", allowed, rule="other_blocks")
    return [shared.proof(block, each) for block, each in zip(blocks, identities, strict=True)]


def _hand_over(line: Line, shared: SharedSet) -> None:
    assert shared.path is not None
    try:
        descriptor = open_own(shared.path, os.O_RDONLY)
    except OSError as error:
        raise PeerError(line.address, f"{shared.path}: {error.strerror}") from error
    try:
        line.send_file(descriptor)
    finally:
        os.close(descriptor)
