"""Disks that fail: the kernel's own answers, without a file system of our own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = "/dev/full"
"""Every write answers ENOSPC; what is read is zeros."""
BROKEN = "/proc/self/mem"
"""Every read near its begin answers EIO; it is opened for reading alone: a write answers EBADF."""


@contextmanager
def in_place_of(path: Path, device: str) -> Iterator[None]:
    """Replace open files of this process by a device, while this lasts."""
    taken = _descriptors_of(path)
    assert taken
    kept = {descriptor: os.dup(descriptor) for descriptor in taken}
    instead = os.open(device, os.O_RDONLY if device == BROKEN else os.O_RDWR)
    for descriptor in taken:
        os.dup2(instead, descriptor)
    try:
        yield
    finally:
        for descriptor, file in kept.items():
            os.dup2(file, descriptor)
            os.close(file)
        os.close(instead)


def _descriptors_of(path: Path) -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one that lists them
            continue
        if target == str(path):
            found.append(int(name))
    return found
