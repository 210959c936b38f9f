"""Files and folders that other users can neither change nor read.

    /         root        every folder of a path is examined, by a handle that is opened below the
    /var      root        handle of the one before, without following links. Each belongs to this
    /var/kv   this user   user or to root, and other users cannot write to it.

Nothing is opened by these handles later: other libraries open by path. The path has no links, and
only this user and root can rename or replace a folder of it, so that it still leads to the folders
that were examined. In a sticky folder (/tmp) others can add files, but not rename ours.
"""

import errno
import fcntl
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from router.errors import ConfigError

FOLDER_MODE, FILE_MODE = 0o700, 0o600

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_HANDLE = _FOLDER | getattr(os, "O_PATH", os.O_RDONLY)
"""Flags for a folder that may be searched only; systems without O_PATH need to read it as well."""
_ROOT = 0


def make_own_dir(folder: Path) -> None:
    """Create a folder, and missing ones above, for this user only. Raises OSError.

    An existing folder is left as it is.
    """
    if not folder.parent.exists():
        make_own_dir(folder.parent)
    folder.mkdir(mode=FOLDER_MODE, exist_ok=True)


def open_own(path: str | os.PathLike[str], flags: int, *, dir_fd: int | None = None) -> int:
    """Open a file of this user or of root, and no link; use it as an `opener`. Raises OSError.

    A new file is for this user only, and so is one of ours that an earlier version left readable.
    """
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, FILE_MODE, dir_fd=dir_fd)
    try:
        found = os.fstat(descriptor)
        if found.st_uid not in (_ROOT, os.getuid()):
            raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if found.st_uid == os.getuid() and found.st_mode & 0o077:
            os.fchmod(descriptor, FILE_MODE)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def write_own(path: Path, content: bytes) -> None:
    """Write a file that only this user can read. Raises OSError."""
    with open(path, "wb", opener=open_own) as file:
        file.write(content)


def trusted(folder: Path) -> Path:
    """Return the path of a folder without links, if only this user and root can change it.

    Raises PermissionError if other users can change what is in it, or what the path leads to; and
    any other OSError.
    """
    resolved = folder.resolve(strict=True)
    path, *below = [*reversed(resolved.parents), resolved]
    handle = os.open(path, _HANDLE)
    try:
        _check(handle, path, is_above=bool(below))
        for path in below:
            opened = os.open(path.name, _HANDLE, dir_fd=handle)
            os.close(handle)
            handle = opened
            _check(handle, path, is_above=path != resolved)
    finally:
        os.close(handle)
    return resolved


def foreign_in(folder: Path) -> list[Path]:
    """Return what other users can change in a folder, at any depth, and all links. Raises OSError.

    Links are not followed. In a trusted folder, these are leftovers of a time when it was not.
    """
    foreign = []
    for place, folders, files, handle in os.fwalk(folder, onerror=_raise):
        for name in (*folders, *files):
            found = os.stat(name, dir_fd=handle, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode) or _problem(found) is not None:
                foreign.append(Path(place, name))
    return foreign


@contextmanager
def exclusive_dir(folder: Path, *parts: str) -> Iterator[None]:
    """Lock a folder for this process, and create it with the subfolders `parts` if missing.

    Raises ConfigError for `data_dir`, also if other users can change what is in the folder.
    """
    try:
        lock = _lock_of(folder, parts)
    except PermissionError as error:
        problem = f"{error.filename or folder}: {error.strerror}"
        allowed = "a folder that this user can write to, and other users cannot; the same above it"
        raise ConfigError("data_dir", problem, allowed) from error
    except OSError as error:
        problem = f"{folder}: {error.strerror}"
        raise ConfigError("data_dir", problem, "a folder that can be written to") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        problem = f"{folder} is in use"
        raise ConfigError("data_dir", problem, "a separate folder for each process") from error
    try:
        yield
    finally:
        os.close(lock)


def _lock_of(folder: Path, parts: tuple[str, ...]) -> int:
    """Create what is missing, and open the lock file. Raises OSError."""
    make_own_dir(folder)
    folder = trusted(folder)
    handle = os.open(folder, _FOLDER)
    try:
        for part in parts:
            make_own_dir(folder / part)
            opened = os.open(part, _FOLDER, dir_fd=handle)
            try:
                _check(opened, folder / part)
            finally:
                os.close(opened)
        return open_own("lock", os.O_RDWR | os.O_CREAT, dir_fd=handle)
    finally:
        os.close(handle)


def _raise(error: OSError) -> None:
    raise error


def _check(handle: int, path: Path, *, is_above: bool = False) -> None:
    """Raise PermissionError if other users can change the opened folder.

    `is_above`: what matters is a folder in it, which is examined next.
    """
    found = os.fstat(handle)
    problem = _problem(found)
    is_sticky = is_above and bool(found.st_mode & stat.S_ISVTX)
    if problem is not None and not (is_sticky and found.st_uid in (_ROOT, os.getuid())):
        raise PermissionError(errno.EPERM, problem, str(path))


def _problem(found: os.stat_result) -> str | None:
    """Return why other users can change a file or folder, or None. Access lists count as group."""
    if found.st_uid not in (_ROOT, os.getuid()):
        return "it belongs to another user"
    if found.st_mode & stat.S_IWOTH:
        return "all users can write to it"
    if found.st_mode & stat.S_IWGRP and not _is_ours_alone(found.st_gid):
        return "its group can write to it"
    return None


def _is_ours_alone(group: int) -> bool:
    """Return whether this process is in a group, and no account of another user is.

    That is so for a user's private group, and for the group of a volume in Kubernetes (`fsGroup`).
    """
    if group not in (os.getegid(), *os.getgroups()):
        return False
    accounts = pwd.getpwall()
    ours = {each.pw_name for each in accounts if each.pw_uid in (_ROOT, os.getuid())}
    try:
        members = set(grp.getgrgid(group).gr_mem)
    except KeyError:  # a number without a name
        members = set()
    members |= {each.pw_name for each in accounts if each.pw_gid == group}
    return members <= ours
