"""Secrets of the fleet, read from files or settings."""

import re
from pathlib import Path

from router.errors import ConfigError
from router.runtime.kernels.hash_key import BlockKey, derive

MIN_SECRET_BYTES = 16
_HEX = re.compile("(?:[0-9a-fA-F]{2})+")


def read_block_key(path: str, text: str) -> BlockKey | None:
    """Return the key of the secret in file `path`, or given as `text`.

    Returns None if both are empty. Raises ConfigError.
    """
    if path:
        return derive(read_secret("block_key_file", path))
    return derive(_decoded("block_key", text.encode())) if text else None


def read_secret(key: str, path: str) -> bytes:
    """Read a secret from a file: hexadecimal digits, or any other bytes. Raises ConfigError."""
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
