"""Memory for blocks: whole or not at all, and kept while it is registered."""

import subprocess
import sys

import pytest
import torch

from worker_agent.storage.base import Registrations, StorageKind
from worker_agent.storage.errors import RegistrationError, StorageError
from worker_agent.storage.mapped_file import MappedFile
from worker_agent.storage.memory import device_memory, host_memory, pinned_memory, shared_memory


def test_memory_is_bytes_in_a_row():
    with host_memory(4096) as storage:
        assert storage.kind is StorageKind.SYSTEM
        assert storage.region.size_bytes == 4096
        storage.view(8, 4).fill_(7)
        assert storage.tensor.sum() == 28
        assert storage.view(8, 4).data_ptr() == storage.region.address + 8


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (4096, 1), (0, 4097), (8, -9)])
def test_a_part_is_within(offset, size):
    with host_memory(4096) as storage, pytest.raises(StorageError, match="allowed: 0 to 4096"):
        storage.view(offset, size)


def test_memory_of_impossible_size_is_refused():
    with pytest.raises(StorageError, match=r"size_bytes: 0 \(allowed: at least 1\)"):
        host_memory(0)
    with pytest.raises(StorageError, match=r"size_bytes: 1152921504606846976: "):
        host_memory(2**60)


def test_devices_are_torch_s():
    with device_memory(64, torch.device("cpu")) as storage:
        assert storage.kind is StorageKind.DEVICE
        assert storage.tensor.device.type == "cpu"
    expected = StorageKind.PINNED if torch.cuda.is_available() else StorageKind.SYSTEM
    with pinned_memory(64) as storage:
        assert storage.kind is expected
        assert storage.tensor.is_pinned() == torch.cuda.is_available()


def test_closed_storage_is_refused():
    storage = host_memory(64)
    storage.close()
    storage.close()
    with pytest.raises(StorageError, match="storage: closed"):
        storage.view(0, 1)


def test_registrations_are_released_before_memory():
    storage, order = host_memory(64), []

    def release(name):
        assert storage.region.size_bytes == 64
        order.append(name)

    storage.registrations.add("first", lambda: release("first"))
    storage.registrations.add("second", lambda: release("second"))
    with pytest.raises(RegistrationError, match="first: registered already"):
        storage.registrations.add("first", list)
    storage.registrations.add("third", lambda: release("third"))
    storage.registrations.drop("third")
    with pytest.raises(
        RegistrationError, match=r"third: not registered \(allowed: first, second\)"
    ):
        storage.registrations.drop("third")
    storage.close()
    assert order == ["second", "first"]


def test_memory_stays_until_every_registration_is_released():
    storage, can_let_go = host_memory(64), []

    def release():
        if not can_let_go:
            raise ConnectionError

    storage.registrations.add("peer", release)
    with pytest.raises(ConnectionError):
        storage.close()
    assert storage.region.size_bytes == 64
    can_let_go.append(True)
    storage.close()
    assert len(storage.registrations) == 0


def test_registrations_are_released_once():
    of, calls = Registrations(), []
    of.add("a", lambda: calls.append("a"))
    of.release_all()
    of.release_all()
    assert calls == ["a"]


def test_shared_memory_is_found_again_by_its_name(tmp_path):
    path = tmp_path / "blocks"
    with shared_memory(MappedFile(path, 8192)) as storage:
        storage.view(4096, 4).fill_(9)
        with pytest.raises(StorageError, match="not locked by another process"):
            MappedFile(path, 8192)
    file = MappedFile(path, 8192)
    assert not file.is_new
    with shared_memory(file) as storage:
        assert storage.tensor.sum() == 36


def test_shared_memory_survives_a_killed_process(tmp_path):
    path = tmp_path / "blocks"
    script = (
        "import os, sys; from pathlib import Path\n"
        "from worker_agent.storage.mapped_file import MappedFile\n"
        "file = MappedFile(Path(sys.argv[1]), 4096); file.buffer[7] = 42; os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert killed.returncode == -9
    file = MappedFile(path, 4096)
    assert (file.is_new, file.buffer[7]) == (False, 42)
    file.close()


def test_another_size_is_another_file(tmp_path):
    path = tmp_path / "blocks"
    file = MappedFile(path, 4096)
    file.buffer[0] = 1
    file.close()
    file = MappedFile(path, 8192)
    assert (file.is_new, file.buffer[0]) == (True, 0)
    file.close()
    file.remove()
    assert not path.exists()
    with pytest.raises(StorageError, match="No such file or directory"):
        MappedFile(tmp_path / "nowhere" / "blocks", 4096)
