"""Folders for machine code, and what may be loaded from them.

  NUMBA_CACHE_DIR, ~/.cache/kv-router, /tmp/kv-router-{uid}, /dev/shm/… ──▶ {fingerprint}/…

Machine code is executed as it is found: a folder is used only if other users can change neither it,
nor a folder above it, nor anything in it (`runtime/own_files.py`). Files are opened by path, after
these checks; only this user and root could replace them in between. Files that differ from their
checksums are dropped before anything is loaded, because damaged machine code may crash the process.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from router.runtime.own_files import foreign_in, make_own_dir, open_own, trusted

_SUMS = "SHA256SUMS"


def fingerprint() -> str:
    """Return a hash of everything that affects machine code that is compiled here."""
    parts = [_version_of("numba"), sys.version.encode()]
    parts += [os.environ.get("NUMBA_CPU_NAME", "").encode(), sources().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def sources() -> str:
    """Return a hash of the source that affects the machine code.

    Numba checks for changes of a kernel's own file only. Kernels span all modules named `_*`, and
    their machine code depends on the layouts of events, ranks and terms.
    """
    folder = Path(__file__).parents[2]
    layouts = ("protocol/events.py", "sequence/rank_table.py", "scheduler/terms.py")
    files = [*(folder / layout for layout in layouts), *sorted(folder.rglob("_[!_]*.py"))]
    files += sorted(Path(__file__).parent.glob("[!_]*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _version_of(package: str) -> bytes:
    """Return the text of a package's version, without importing it."""
    spec = PathFinder.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return b"" if not places else (Path(places[0]) / "_version.py").read_bytes()


def prepare_folder(places: Iterable[Path], name: str) -> Path | None:
    """Return the first usable folder, filled from the first one that could only be read."""
    prebuilt = None
    for candidate in places:
        folder = _writable(candidate / name)
        if folder is None:
            prebuilt = prebuilt or readable(candidate / name)
            continue
        with contextlib.suppress(OSError):
            _drop_damaged(folder)
            if prebuilt is not None:
                _copy_missing(prebuilt, folder)
        return folder
    return None


def candidates() -> Iterator[Path]:
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
        with locked(found, fcntl.LOCK_SH):  # no other process is creating files there
            return None if foreign_in(found) else found
    except OSError:
        return None


def readable(folder: Path) -> Path | None:
    """Return the path of a trusted folder with nothing of other users in it, or None."""
    try:
        found = trusted(folder)
        return None if foreign_in(found) else found
    except OSError:
        return None


def _copy_missing(source: Path, target: Path) -> None:
    whole = _whole_files(source)
    with locked(target, fcntl.LOCK_EX):
        for file in whole:
            copy = target / file.relative_to(source)
            if not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
        if whole:
            note_sums(target)


def _drop_damaged(folder: Path) -> None:
    with locked(folder, fcntl.LOCK_SH):
        if not _damaged(folder):
            return
    with locked(folder, fcntl.LOCK_EX):
        for file in _damaged(folder):
            file.unlink()


def _damaged(folder: Path) -> set[Path]:
    return set(files_of(folder)) - _whole_files(folder)


def _whole_files(folder: Path) -> set[Path]:
    """Return the files that match their recorded checksums."""
    try:
        sums = set((folder / _SUMS).read_bytes().splitlines())
    except FileNotFoundError:
        return set()
    return {file for file in files_of(folder) if _sum_line(folder, file) in sums}


def note_sums(folder: Path) -> None:
    """Record the checksums of a folder's files."""
    lines = [_sum_line(folder, file) for file in files_of(folder)]
    with contextlib.suppress(OSError):
        (folder / _SUMS).write_bytes(b"\n".join(lines))


def _sum_line(folder: Path, file: Path) -> bytes:
    return f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(folder)}".encode()


def files_of(folder: Path | None) -> list[Path]:
    """Return Numba's files in a folder, at any depth."""
    return [] if folder is None else list(folder.rglob("*.nb[ci]"))


@contextlib.contextmanager
def locked(folder: Path | None, mode: int) -> Iterator[int]:
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
