"""Blocks given to another worker: their bytes, or, on one host, the memory they lie in."""

import os
from collections.abc import Sequence
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


class SharedSet(Struct, frozen=True):
    """Blocks that others may have: their pool, which threads share, and their bytes.

    `path`: of the file that the memory is, where it is one. Whoever is on this host and knows the
    token may map it, to read.
    """

    pool: BlockPool
    window: Window
    path: Path | None = None

    @property
    def can_be_mapped(self) -> bool:
        """Whether the memory is a file, and every block one piece of it."""
        return self.path is not None and self.window.is_in_one_piece


class Giving(Struct, frozen=True):
    """Blocks to be given; `missing`: places in the request that none is for."""

    set_idx: int
    shared: SharedSet
    blocks: Sequence[int]
    missing: list[int]

    @property
    def can_be_mapped(self) -> bool:
        """Whether the other worker can read them where they lie."""
        return self.shared.can_be_mapped


def give_bytes(line: Line, giving: Giving) -> None:
    """Over the socket. Raises PeerError."""
    window = giving.shared.window
    line.send(Sent(giving.missing, window.block_bytes))
    line.send_blocks(window.outgoing(giving.blocks))


def give_mapped(line: Line, giving: Giving, handed_over: set[int]) -> None:
    """Where they lie; returns when the other worker has them. Raises PeerError."""
    window, has_file = giving.shared.window, giving.set_idx not in handed_over
    checked = range(0, len(giving.blocks), CHECK_EVERY)
    views = window.outgoing([giving.blocks[place] for place in checked])
    checks = {at: xxh3_64_intdigest(view) for at, view in zip(checked, views, strict=True)}
    sizes = window.block_bytes, giving.set_idx, window.memory_bytes
    offsets = window.offsets(giving.blocks)
    line.send(Mapped(giving.missing, *sizes, offsets, checks, has_file))
    if has_file:
        _hand_over(line, giving.shared)
        handed_over.add(giving.set_idx)
    line.receive(Taken)


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
