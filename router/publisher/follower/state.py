"""The state file of a followed rank, from which a restarted process continues.

"KVRF" │ version u16 │ reserved u16 │ body length u64 │ checksum u64 │ body
                                       XXH3-64 of the body            msgpack
"""

import asyncio
import logging
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct, msgpack
from xxhash import xxh3_64_intdigest

from router.protocol.values import UNREADABLE, Rank
from router.publisher.batch_order.position import SavedPosition
from router.publisher.errors import FeedStateError, NormalizerStateError
from router.publisher.normalizer.normalizer import Normalizer
from router.publisher.normalizer.state import BIN, BIN_HEAD, NO_BYTES, SavedParts, size_and_checksum
from router.runtime.own_files import open_own

MAGIC = b"KVRF"
VERSION = 1

_HEADER = struct.Struct("<4sHHQQ")


class FeedState(Struct, frozen=True):
    """A position in the engine's batches, and the normaliser's state there."""

    position: SavedPosition
    normalizer: bytes


_decoder = msgpack.Decoder(FeedState)


def load_feed_state(path: Path) -> FeedState | None:
    """Load a state. Returns None if there is none; raises FeedStateError if it is unusable."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FeedStateError(str(path), str(error)) from error
    return _decode(content, str(path))


def save_feed_state(path: Path, position: SavedPosition, normalizer: SavedParts) -> None:
    """Save a state; a crash at any time leaves either the former state or this one, complete.

    Waits for the disk, without holding the interpreter lock. Raises FeedStateError.
    """
    begin = msgpack.encode(FeedState(position, b"")).removesuffix(NO_BYTES)
    head = BIN_HEAD.pack(BIN, sum(map(len, normalizer)))
    parts = [begin, head, *normalizer]
    header = _HEADER.pack(MAGIC, VERSION, 0, *size_and_checksum(parts))
    try:
        replace_file(path, header, *parts)
    except OSError as error:
        raise FeedStateError(str(path), str(error)) from error


def replace_file(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file of this user only, atomically and durably: readers never see a part of it."""
    draft = path.with_name(path.name + ".new")
    with open(draft, "wb", buffering=0, opener=open_own) as file:
        for part in parts:
            _write_all(file, part)
        os.fsync(file.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write_all(file: FileIO, part: bytes | memoryview) -> None:
    rest = memoryview(part)
    while len(rest):
        rest = rest[file.write(rest) :]


def _decode(content: bytes, path: str) -> FeedState:
    if len(content) < _HEADER.size or content[:4] != MAGIC:
        raise FeedStateError(path, "not a state file")
    _, version, _, length, checksum = _HEADER.unpack_from(content)
    if version != VERSION:
        raise FeedStateError(path, f"version {version} (allowed: {VERSION})")
    body = content[_HEADER.size :]
    if len(body) != length or xxh3_64_intdigest(body) != checksum:
        raise FeedStateError(path, "damaged: its length or checksum differs")
    try:
        return _decoder.decode(body)
    except UNREADABLE as error:
        raise FeedStateError(path, str(error)) from error


log = logging.getLogger(__name__)

ReadState: TypeAlias = Callable[[], tuple[SavedPosition, SavedParts]]


class StateFile:
    """The state file of one rank. Without a path no state is saved."""

    __slots__ = ("_keeping", "_path", "_rank")

    def __init__(self, rank: Rank, path: Path | None) -> None:
        self._rank = rank
        self._path = path
        self._keeping = asyncio.Lock()

    def restored(self, normalizer: Normalizer, now_s: float) -> SavedPosition | None:
        """Restore a former process's state. Returns its position, or None without one."""
        try:
            state = None if self._path is None else load_feed_state(self._path)
            if state is None:
                return None
            normalizer.load(state.normalizer, now_s)
        except (FeedStateError, NormalizerStateError) as error:
            log.warning("rank %s: %s; starting without the saved state", self._rank, error)
            self._set_aside()
            return None
        return state.position

    async def keep(self, read: ReadState) -> None:
        """Write the state that `read` returns, after any write that is still in progress.

        A cancelled call may still be writing to disk; the next one waits for it. A thread reads and
        writes: the state must not change until this returns.
        """
        async with self._keeping:
            if self._path is None:
                return
            try:
                await asyncio.to_thread(_write, self._path, read)
            except FeedStateError as error:
                log.warning("rank %s: state not saved: %s", self._rank, error)

    def _set_aside(self) -> None:
        """Rename an unusable file, for a later examination; only the last one of a rank is kept."""
        if self._path is None:
            return
        aside = self._path.with_name(self._path.name + ".damaged")
        with suppress(OSError):
            self._path.replace(aside)
            log.warning("rank %s: the unusable state file was renamed to %s", self._rank, aside)


def _write(path: Path, read: ReadState) -> None:
    save_feed_state(path, *read())
