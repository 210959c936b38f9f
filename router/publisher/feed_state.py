"""What a feed knows of its engine, in a file, to go on from after a restart of the process.

"KVRF" │ version u16 │ reserved u16 │ body length u64 │ checksum u64 │ body
                                       XXH3-64 of the body            msgpack
"""

import os
import struct
from io import FileIO
from pathlib import Path

from msgspec import DecodeError, Struct, msgpack
from xxhash import xxh3_64_intdigest

from router.publisher.engine_position import SavedPosition
from router.publisher.errors import FeedStateError
from router.publisher.normalizer_state import (
    BIN,
    BIN_HEAD,
    NO_BYTES,
    SavedParts,
    size_and_checksum,
)

MAGIC = b"KVRF"
VERSION = 1

_HEADER = struct.Struct("<4sHHQQ")


class FeedState(Struct, frozen=True):
    """Position in the engine's batches, and what its normaliser knew there."""

    position: SavedPosition
    normalizer: bytes


_decoder = msgpack.Decoder(FeedState)


def load_feed_state(path: Path) -> FeedState | None:
    """What was kept; None if nothing was. Raises FeedStateError for what cannot be used."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FeedStateError(str(path), str(error)) from error
    return _decode(content, str(path))


def save_feed_state(path: Path, position: SavedPosition, normalizer: SavedParts) -> None:
    """Keep a state: after a crash at any moment there is the former one, or this one, whole.

    Waits for the disk, without holding the interpreter. Raises FeedStateError.
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
    """Write a file as a whole, durably: nobody ever sees a part of it."""
    draft = path.with_name(path.name + ".new")
    with draft.open("wb", buffering=0) as file:
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
        raise FeedStateError(path, "it does not begin like one")
    _, version, _, length, checksum = _HEADER.unpack_from(content)
    if version != VERSION:
        raise FeedStateError(path, f"version {version} (allowed: {VERSION})")
    body = content[_HEADER.size :]
    if len(body) != length or xxh3_64_intdigest(body) != checksum:
        raise FeedStateError(path, "it is damaged")
    try:
        return _decoder.decode(body)
    except DecodeError as error:
        raise FeedStateError(path, str(error)) from error
