"""A fleet's secret, and what is derived from it: a key for names of blocks, and a fingerprint that
tells two secrets apart without telling either.
"""

import re
from hashlib import blake2b
from pathlib import Path

from msgspec import Struct

from router.errors import ConfigError

MIN_SECRET_BYTES = 16
_HEX = re.compile("(?:[0-9a-fA-F]{2})+")


class BlockKey(Struct, frozen=True):
    """A key of SipHash, as two little-endian u64, and the fingerprint of its secret."""

    low: int
    high: int
    fingerprint: str

    def __repr__(self) -> str:
        return f"BlockKey({self.fingerprint})"


def derive(secret: bytes, purpose: str = "blocks") -> BlockKey:
    """The key for a purpose; others cannot be told from it."""
    key = blake2b(secret, digest_size=16, person=f"key {purpose}".encode()).digest()
    fingerprint = blake2b(secret, digest_size=4, person=f"id {purpose}".encode()).hexdigest()
    return BlockKey(
        int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little"), fingerprint
    )


def read_block_key(path: str, said: str) -> BlockKey | None:
    """The key of a secret in a file, or said; None: there is none. Raises ConfigError."""
    if path:
        return derive(read_secret("block_key_file", path))
    return derive(_decoded("block_key", said.encode())) if said else None


def read_secret(key: str, path: str) -> bytes:
    """A secret from a file: hexadecimal digits, or any other bytes. Raises ConfigError."""
    try:
        return _decoded(key, Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(key, f"{path}: {error.strerror}", "a readable file") from error


def _decoded(key: str, content: bytes) -> bytes:
    text = content.strip()
    secret = content
    if _HEX.fullmatch(text.decode("latin-1")):
        secret = bytes.fromhex(text.decode())
    elif text.isascii():
        secret = text
    if len(secret) < MIN_SECRET_BYTES:
        allowed = f"at least {MIN_SECRET_BYTES}, such as `openssl rand -hex 32` gives"
        raise ConfigError(key, f"{len(secret)} bytes", allowed)
    return secret
