"""From foreign bytes to a checked value, or one error that says why not."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from router.errors import WireError

T = TypeVar("T")


def decode(decoder: Callable[[bytes], T], payload: bytes) -> T:
    """Apply a msgspec decoder to bytes from the bus. Raises WireError, and nothing else."""
    try:
        return decoder(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(str(error)) from error
