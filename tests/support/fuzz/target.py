"""A parser under test, and what it may answer."""

import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

from msgspec import Struct

Check: TypeAlias = Callable[[bytes], Any]
"""Parse an input, and assert what must hold of the result."""

Form: TypeAlias = Literal["bytes", "json", "msgpack"]

SLOW_S = 1.0
"""An input of at most 64 KiB that takes longer is a finding."""


class Target(Struct, frozen=True):
    """One entry of the table.

    `make`: returns a new check, with its own state. `seeds`: valid inputs, of the project's own
    encoders and of recorded vectors. `refusals`: the documented exceptions; any other one is a
    finding. `form`: how valid inputs are built, so that mutations can change a value in the middle.
    """

    name: str
    make: Callable[[], Check]
    seeds: Callable[[], list[bytes]]
    refusals: tuple[type[Exception], ...] = ()
    form: Form = "bytes"


def scratch_folder(owner: object) -> Path:
    """Return a folder in memory, which is removed with its owner."""
    folder = tempfile.mkdtemp(dir="/dev/shm")
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def accepts(check: Check, refusals: tuple[type[Exception], ...], data: bytes) -> bool:
    """Return whether a parser accepts an input. Raises what is a finding."""
    try:
        check(data)
    except refusals:
        return False
    return True
