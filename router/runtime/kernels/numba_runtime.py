"""Kernels: Python compiled to machine code once, and mapped by every later process.

    python -m router.warm ──Numba──▶ kernels-….image ──▶ a process maps it, without Numba

`kernel` gives a function while its module is imported, so no request waits for a compilation. The
image is in a folder, named by a hash of everything that affects the code (`code_cache.py`), and is
named by the machine: several may share a home. The first process that finds none has it made by
another, and the others wait for that; a folder that can only be read serves as it is. Without any,
an image within the package (`make dist`) serves, if it is of this source and interpreter.

Numba compiles within the process instead where no image is made (other machines than x86-64, no
folder that can be written), and for kernels that are not ours. Its files are in the same folder.
Processes that start cold together compile once, one after the other; later ones load side by side.
If no folder can be used, each process compiles for itself. `KV_ROUTER_KERNELS` says how:

    numba  by Numba within the process        image  make the image (`router.warm` sets this)
"""

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from router.runtime.kernels.code_cache import (
    candidates,
    files_of,
    fingerprint,
    locked,
    note_sums,
    prepare_folder,
    readable,
    sources,
)
from router.runtime.kernels.image import (
    SHIPPED_MACHINE,
    Image,
    is_supported,
    machine,
    runs_shipped,
    shipped_path,
)

F = TypeVar("F", bound=Callable[..., object])

_MODE = os.environ.get("KV_ROUTER_KERNELS", "")
_IMAGE = f"kernels-{machine()}.image" if is_supported() else ""


def _mapped(folders: Iterable[Path]) -> tuple[Path | None, Image | None]:
    """Return the first image that is whole and that others cannot change, and its folder."""
    for each in folders:
        folder = readable(each)
        if folder is not None and (folder / _IMAGE).is_file():
            with contextlib.suppress(OSError, ValueError, KeyError):
                return folder, Image(folder / _IMAGE, machine())
    return None, None


def _shipped() -> tuple[Path | None, Image | None]:
    """Return the image that this package contains, if this machine can run it, and its folder."""
    path = shipped_path(sources())
    if path.is_file() and runs_shipped() and readable(path.parent) is not None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return path.parent, Image(path, SHIPPED_MACHINE)
    return None, None


def _mapped_or_made() -> tuple[Path | None, Image | None]:
    """Return the image, and its folder. Without one, have another process make it."""
    name = fingerprint()
    folder, image = _mapped(each / name for each in candidates())
    if image is None:
        folder, image = _shipped()
    if image is not None or not is_supported():
        return folder, image
    folder = prepare_folder(candidates(), name)
    if folder is None:
        return None, None
    with locked(folder, fcntl.LOCK_EX):
        found = _mapped([folder])
        if found[1] is not None:
            return found
        _say(f"kv-router: compiling its kernels, once (kept in {folder})")
        paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
        changes = {"KV_ROUTER_KERNELS": "image", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        subprocess.run(  # noqa: S603 - this interpreter, and a path of ours
            [sys.executable, "-m", "router.warm", str(folder / _IMAGE)],
            env=os.environ | changes, stdout=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    return _mapped([folder])


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # stderr is closed, or the disk is full
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


_folder, _image = (None, None) if _MODE else _mapped_or_made()
_kernels: list[tuple[str, Any, str]] = []
"""What is compiled to make an image."""

if TYPE_CHECKING or _image is None:
    import numba as numba
    from llvmlite import ir as ir
    from numba.core import cgutils
    from numba.core.errors import NumbaError
    from numba.extending import intrinsic as intrinsic

    if _MODE != "image":
        _folder = prepare_folder(candidates(), fingerprint())
    _indexes = frozenset(file.name.partition(".py3")[0] for file in files_of(_folder))
    if _folder is not None:
        numba.config.CACHE_DIR = str(_folder)
    if not _indexes and _MODE != "image":
        _in_memory = "in memory: no folder can be written by this user alone"
        _where = f"kept in {_folder}" if _folder else _in_memory
        _say(f"kv-router: compiling its kernels, in one process: minutes ({_where})")
else:
    numba = ir = cgutils = None
    _indexes = frozenset()

    def intrinsic(function: F) -> F:
        """Leave a function as it is: it is compiled already."""
        return function


_NO_WRAPPERS = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def device(function: F) -> F:
    """Compile a function that kernels call; it is inlined into each of them."""
    if _image is not None:
        return function
    compiled: F = numba.njit(function, forceinline=True, error_model="numpy", **_NO_WRAPPERS)
    return compiled


def cache_folder() -> Path | None:
    """Return the folder of compiled kernels. Returns None if no folder is writable."""
    return _folder


def kernels_to_compile() -> list[tuple[str, Any, str]]:
    """Return the key, Numba's function and the signature of each kernel of an image to make."""
    return _kernels


def kernel(signature: str) -> Callable[[F], F]:
    """Return a decorator that compiles a function for one signature, run without the GIL."""

    def mapped_or_compiled(function: F) -> F:
        key = f"{function.__module__}.{function.__qualname__}({signature})"
        if _image is not None:
            return cast(F, _image.function(key))
        if _MODE == "image":
            compiled_later = numba.njit(nogil=True, error_model="numpy", **_NO_WRAPPERS)(function)
            _kernels.append((key, compiled_later, signature))
            return cast(F, compiled_later)
        return _compiled_or_loaded(function, signature)

    return mapped_or_compiled


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(_context: object, address: object) -> object:
    def convert(_context: object, builder: Any, _signature: object, arguments: Any) -> object:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return numba.types.voidptr(address), convert


@device
def words_at(address: np.uint64, length: np.uint64) -> npt.NDArray[np.uint64]:
    """Return the memory of an array of u64 as an array; invalid once the owner is freed."""
    words: npt.NDArray[np.uint64] = numba.carray(_pointer(address), (length,), np.uint64)
    return words


@device
def halves_at(address: np.uint64, length: np.uint64) -> npt.NDArray[np.uint32]:
    """Return the memory of an array of u32 as an array; invalid once the owner is freed."""
    halves: npt.NDArray[np.uint32] = numba.carray(_pointer(address), (length,), np.uint32)
    return halves


@device
def word_rows_at(address: int, rows: int, width: int) -> npt.NDArray[np.uint64]:
    """Return the memory of an array of u64, of shape (rows, width); invalid as `words_at`."""
    found: npt.NDArray[np.uint64] = numba.carray(_pointer(address), (rows, width), np.uint64)
    return found


@device
def int_rows_at(address: int, rows: int, width: int) -> npt.NDArray[np.int64]:
    """Return the memory of an array of i64, of shape (rows, width); invalid as `words_at`."""
    found: npt.NDArray[np.int64] = numba.carray(_pointer(address), (rows, width), np.int64)
    return found


@device
def float_rows_at(address: int, rows: int, width: int) -> npt.NDArray[np.float64]:
    """Return the memory of an array of f64, of shape (rows, width); invalid as `words_at`."""
    found: npt.NDArray[np.float64] = numba.carray(_pointer(address), (rows, width), np.float64)
    return found


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_context: object, address: object) -> object:
    """Prefetch the cache line at an address, without waiting for it."""

    def ask(context: Any, builder: Any, _signature: object, arguments: Any) -> object:
        pointer, flag = cgutils.voidptr_t, ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
        llvm_prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        place = builder.inttoptr(arguments[0], pointer)
        write, keep, data = ir.Constant(flag, 1), ir.Constant(flag, 3), ir.Constant(flag, 1)
        builder.call(llvm_prefetch, [place, write, keep, data])
        return context.get_dummy_value()

    return numba.types.none(address), ask


@intrinsic  # type: ignore[untyped-decorator]
def trailing_zeros(_context: object, _word: object) -> object:
    """Return the number of zero bits below the lowest one bit of a word."""

    def count(_context: object, builder: Any, _signature: object, arguments: Any) -> object:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return numba.uint64(numba.uint64), count


def _compiled_or_loaded(function: F, signature: str) -> F:
    is_kept = _index_name(function) in _indexes
    with locked(_folder, fcntl.LOCK_SH if is_kept else fcntl.LOCK_EX) as lock:
        compiled = _compile_or_load(function, signature)
        if _folder is not None and compiled.stats.cache_misses:
            fcntl.flock(lock, fcntl.LOCK_EX)
            note_sums(_folder)
        return cast(F, compiled)


def _compile_or_load(function: F, signature: str) -> Any:
    try:
        return _compile(function, signature, is_kept=_folder is not None)
    except NumbaError:
        raise
    except OSError:  # the disk is full
        return _compile(function, signature, is_kept=False)
    except Exception:  # noqa: BLE001 - unpickling a file of another program may raise anything
        _wipe(function)
        return _compile(function, signature, is_kept=_folder is not None)


def _compile(function: F, signature: str, *, is_kept: bool) -> Any:
    options = {"cache": is_kept, "nogil": True, "error_model": "numpy"}
    return numba.njit([signature], **options)(function)


def _wipe(function: Callable[..., object]) -> None:
    for file in files_of(_folder):
        if file.name.startswith(f"{_index_name(function)}."):
            file.unlink(missing_ok=True)


def _index_name(function: Callable[..., object]) -> str:
    """Return how Numba names a function's index file, up to the version of Python."""
    code = function.__code__
    return f"{Path(code.co_filename).stem}.{function.__qualname__}-{code.co_firstlineno}"
