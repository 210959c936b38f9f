"""An image of compiled kernels, mapped by a process without Numba; `image_builder.py` makes it.

    header: SHA-256, length ─ description (JSON) │ page │ code │ page │ imports, data

Mapped privately: processes share the pages of code, and each has its own few pages of data.
"""

import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import platform
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1
SHIPPED_MACHINE = "x86-64-v3"
"""The processors that an image in a package is for: those since 2013 (Haswell), or 2015 (AMD)."""

_SHIPPED_FLAGS = frozenset(["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"])
"""What distinguishes them, as Linux names it."""
PAGE_BYTES = mmap.PAGESIZE
HEADER = struct.Struct("<32sQ")

_VECTORCALL = 0x80
"""`METH_FASTCALL`: a function gets its arguments as an array."""


class _Method(ctypes.Structure):
    """`PyMethodDef`."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("text", ctypes.c_char_p),
    )


def is_supported() -> bool:
    """Return whether images are made for this machine and interpreter."""
    is_machine = platform.machine() == "x86_64" and os.uname().sysname == "Linux"
    return is_machine and platform.python_implementation() == "CPython"


def machine() -> str:
    """Return which machines can run what is compiled here: a name, or a hash of its features."""
    chosen = os.environ.get("NUMBA_CPU_NAME")
    if chosen:
        return chosen
    lines = {line for line in _processors() if line.startswith(("flags", "model name"))}
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()[:16]


def runs_shipped() -> bool:
    """Return whether this machine can run an image that a package contains."""
    flags = [line.split() for line in _processors() if line.startswith("flags")]
    return is_supported() and all(_SHIPPED_FLAGS.issubset(each) for each in flags) and bool(flags)


def shipped_path(sources: str) -> Path:
    """Return where a package has its image for this interpreter.

    `sources`: a hash of the source that it was made from.
    """
    tag = sys.implementation.cache_tag
    return Path(__file__).parent / "shipped" / f"{SHIPPED_MACHINE}.{tag}.{sources}.image"


def _processors() -> list[str]:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        return file.readlines()


class Image:
    """Mapped machine code, which stays as long as one of its functions does."""

    __slots__ = ("_functions", "_kept", "_start")

    def __init__(self, path: Path, machine: str) -> None:
        """Map a file. Raises OSError or ValueError if it is not whole, or of another machine."""
        with path.open("rb") as file:  # once: another process may put a new file in its place
            content = file.read()
            head, body = content[: HEADER.size], content[HEADER.size :]
            if len(head) < HEADER.size or not head.startswith(hashlib.sha256(body).digest()):
                raise ValueError(f"{path} is damaged")
            _, described_bytes = HEADER.unpack(head)
            described = json.loads(body[:described_bytes])
            if (described["format"], described["machine"]) != (FORMAT, machine):
                raise ValueError(f"{path} is of another machine")
            self._functions: dict[str, int] = described["functions"]
            self._kept: list[Any] = []
            offset = HEADER.size + described_bytes
            self._start = self._map(file.fileno(), offset, content[offset:], described)

    def function(self, key: str) -> Callable[..., Any]:
        """Return a kernel. Raises KeyError if it is not in the image."""
        name = key.partition("(")[0].rpartition(".")[2].encode()
        method = _Method(name, self._start + self._functions[key], _VECTORCALL, None)
        self._kept.append(method)
        make = ctypes.pythonapi.PyCFunction_NewEx
        make.restype = ctypes.py_object
        make.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
        made: Callable[..., Any] = make(ctypes.byref(method), self, None)
        return made

    def _map(self, file: int, offset: int, content: bytes, described: dict[str, Any]) -> int:
        """Return where the code is, ready to run.

        Nothing on a file system that is mounted `noexec` may be executed: there it is copied.
        """
        mapped = mmap.mmap(
            file, len(content), mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset
        )
        with contextlib.suppress(OSError):
            return self._placed(mapped, described)
        copied = mmap.mmap(-1, len(content), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        copied[:] = content
        return self._placed(copied, described)

    def _placed(self, memory: mmap.mmap, described: dict[str, Any]) -> int:
        """Return where memory is, with its imports and pointers filled in, and executable."""
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for name, place in described["imports"].items():
            struct.pack_into("<Q", memory, place, address_of(name))
        for place in described["relative"]:
            (distance,) = struct.unpack_from("<Q", memory, place)
            struct.pack_into("<Q", memory, place, start + distance)
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        code_bytes = described["code_bytes"]
        if protect(start, code_bytes, mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError(ctypes.get_errno(), "machine code may not be executed")
        self._kept.append(memory)
        return start


def address_of(name: str) -> int:
    """Return where a function or object of Python, NumPy or libc is. Raises ValueError."""
    if name == "PyArray_Type":
        return id(np.ndarray)
    for library in (ctypes.CDLL(None), ctypes.CDLL("libm.so.6")):
        with contextlib.suppress(AttributeError):
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    raise ValueError(f"{name} is in no library")
