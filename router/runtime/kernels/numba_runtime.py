"""Numba kernels: compiled once, cached on disk, loaded by every later process.

`kernel` compiles or loads while its module is imported, so no request waits for a compilation. The
machine code is in a folder, named by a hash of everything that affects the code:

  NUMBA_CACHE_DIR, ~/.cache/kv-router, /tmp/kv-router-{uid}, /dev/shm/… ──▶ {fingerprint}/…

A folder that can only be read (a prebuilt one of an image) is copied to one that can be written.
Machine code is executed as it is found: a folder is used only if other users can change neither it,
nor a folder above it, nor anything in it (`runtime/own_files.py`). Numba opens files by path, after
these checks; only this user and root could replace them in between. Files that differ from their
checksums are dropped before anything is loaded, because damaged machine code may crash the process.
Processes that start cold together compile once, one after the other; later ones load side by side.
If no folder can be used, each process compiles for itself.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils
from numba.core.errors import NumbaError
from numba.extending import intrinsic

from router.runtime.own_files import foreign_in, make_own_dir, open_own, trusted

F = TypeVar("F", bound=Callable[..., object])

_SUMS = "SHA256SUMS"


def device(function: F) -> F:
    """Compile a function that kernels call; it is inlined into each of them."""
    compiled: F = numba.njit(
        function, forceinline=True, no_cpython_wrapper=True, error_model="numpy"
    )
    return compiled


def cache_folder() -> Path | None:
    """Return the folder of compiled kernels. Returns None if no folder is writable."""
    return _folder


def kernel(signature: str) -> Callable[[F], F]:
    """Return a decorator that compiles a function for one signature, run without the GIL."""

    def compile_or_load(function: F) -> F:
        is_kept = _index_name(function) in _indexes
        with _locked(_folder, fcntl.LOCK_SH if is_kept else fcntl.LOCK_EX) as lock:
            compiled = _compile_or_load(function, signature)
            if _folder is not None and compiled.stats.cache_misses:
                fcntl.flock(lock, fcntl.LOCK_EX)
                _note_sums(_folder)
            return cast(F, compiled)

    return compile_or_load


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


def _fingerprint() -> str:
    """Return a hash of everything that affects the machine code.

    Numba checks for changes of a kernel's own file only. Kernels span all modules named `_*`, and
    their machine code depends on the layouts of events, ranks and terms.
    """
    parts = [numba.__version__, sys.version, os.environ.get("NUMBA_CPU_NAME", "")]
    folder = Path(__file__).parents[2]
    layouts = ("protocol/events.py", "sequence/rank_table.py", "scheduler/terms.py")
    kernels = sorted(folder.rglob("_[!_]*.py"))
    sources = [Path(__file__), *(folder / layout for layout in layouts), *kernels]
    contents = [source.read_bytes() for source in sources]
    return hashlib.sha256(b"\0".join([*map(str.encode, parts), *contents])).hexdigest()[:16]


def _prepare_folder(candidates: Iterable[Path], name: str) -> Path | None:
    """Return the first usable folder, filled from the first one that could only be read."""
    prebuilt = None
    for candidate in candidates:
        folder = _writable(candidate / name)
        if folder is None:
            prebuilt = prebuilt or _readable(candidate / name)
            continue
        with contextlib.suppress(OSError):
            _drop_damaged(folder)
            if prebuilt is not None:
                _copy_missing(prebuilt, folder)
        return folder
    return None


def _candidates() -> Iterator[Path]:
    """Yield the folders for machine code, the preferred one first.

    There may be no home directory, and no /tmp. A volume at /tmp in Kubernetes can be written by
    all users and is not sticky; /dev/shm is there, and sticky.
    """
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        yield Path(chosen)
    with contextlib.suppress(RuntimeError):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        yield cache / "kv-router"
    with contextlib.suppress(FileNotFoundError):
        yield Path(tempfile.gettempdir()) / f"kv-router-{os.getuid()}"
    yield Path("/dev/shm") / f"kv-router-{os.getuid()}"  # noqa: S108 - it is checked like all


def _writable(folder: Path) -> Path | None:
    """Return the path of a trusted folder of this user, created if missing, or None."""
    try:
        make_own_dir(folder)
        found = trusted(folder)
        if found.stat().st_uid != os.getuid():
            return None
        with tempfile.TemporaryFile(dir=found, buffering=0) as probe:
            probe.write(b".")
        with _locked(found, fcntl.LOCK_SH):  # no other process is creating files there
            return None if foreign_in(found) else found
    except OSError:
        return None


def _readable(folder: Path) -> Path | None:
    """Return the path of a trusted folder with nothing of other users in it, or None."""
    try:
        found = trusted(folder)
        return None if foreign_in(found) else found
    except OSError:
        return None


def _copy_missing(source: Path, target: Path) -> None:
    whole = _whole_files(source)
    with _locked(target, fcntl.LOCK_EX):
        for file in whole:
            copy = target / file.relative_to(source)
            if not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
        if whole:
            _note_sums(target)


def _drop_damaged(folder: Path) -> None:
    with _locked(folder, fcntl.LOCK_SH):
        if not _damaged(folder):
            return
    with _locked(folder, fcntl.LOCK_EX):
        for file in _damaged(folder):
            file.unlink()


def _damaged(folder: Path) -> set[Path]:
    return set(_files(folder)) - _whole_files(folder)


def _whole_files(folder: Path) -> set[Path]:
    """Return the files that match their recorded checksums."""
    try:
        sums = set((folder / _SUMS).read_bytes().splitlines())
    except FileNotFoundError:
        return set()
    return {file for file in _files(folder) if _sum_line(folder, file) in sums}


def _note_sums(folder: Path) -> None:
    lines = [_sum_line(folder, file) for file in _files(folder)]
    with contextlib.suppress(OSError):
        (folder / _SUMS).write_bytes(b"\n".join(lines))


def _sum_line(folder: Path, file: Path) -> bytes:
    return f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(folder)}".encode()


def _files(folder: Path | None) -> list[Path]:
    return [] if folder is None else list(folder.rglob("*.nb[ci]"))


def _wipe(function: Callable[..., object]) -> None:
    for file in _files(_folder):
        if file.name.startswith(f"{_index_name(function)}."):
            file.unlink(missing_ok=True)


def _index_name(function: Callable[..., object]) -> str:
    """Return how Numba names a function's index file, up to the version of Python."""
    code = function.__code__
    return f"{Path(code.co_filename).stem}.{function.__qualname__}-{code.co_firstlineno}"


@contextlib.contextmanager
def _locked(folder: Path | None, mode: int) -> Iterator[int]:
    """Lock a folder, and yield the lock's descriptor.

    Files that Numba creates meanwhile cannot be written by other users. Processes that load what is
    there share the lock (`LOCK_SH`): when it was exclusive, one that started beside others waited
    for them for 1.7 of its 5.7 s.
    """
    if folder is None:
        yield -1
        return
    with open(folder / ".lock", "w", opener=open_own) as lock:
        fcntl.flock(lock, mode)
        mask = os.umask(0o077)
        os.umask(mask | 0o022)
        try:
            yield lock.fileno()
        finally:
            os.umask(mask)


_folder = _prepare_folder(_candidates(), _fingerprint())
_indexes = frozenset(file.name.partition(".py3")[0] for file in _files(_folder))
if _folder is not None:
    numba.config.CACHE_DIR = str(_folder)
if not _indexes:
    with contextlib.suppress(OSError):  # stderr is closed, or the disk is full
        in_memory = "in memory: no folder can be written by this user alone"
        where = f"kept in {_folder}" if _folder else in_memory
        sys.stderr.write(f"kv-router: compiling its kernels, once: about a minute ({where})\n")
        sys.stderr.flush()
