"""Files that outlive their process, also where other users create files."""

import os

import pytest

from worker_agent.storage.errors import StorageError
from worker_agent.storage.mapped_file import MappedFile, kept_path

OTHER_USER = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give files away")


@pytest.fixture
def shared_folder(tmp_path):
    """As /dev/shm."""
    tmp_path.chmod(0o1777)
    return tmp_path


def path_in(folder, stem="kv-1-1"):
    return kept_path(folder, stem, ".host")


def test_in_a_folder_of_this_user_the_name_is_plain(tmp_path):
    assert path_in(tmp_path) == tmp_path / "kv-1-1.host"
    assert path_in(tmp_path / "missing") == tmp_path / "missing" / "kv-1-1.host"


def test_in_a_shared_folder_new_names_cannot_be_guessed(shared_folder):
    found = {path_in(shared_folder) for _ in range(8)}
    assert len(found) == 8
    assert all(len(each.name) == len("kv-1-1-0123456789abcdef.host") for each in found)


def test_in_a_shared_folder_the_next_process_finds_the_file_of_the_former(shared_folder):
    path = path_in(shared_folder)
    file = MappedFile(path, 4096)
    file.buffer[:4] = b"kept"
    file.close()
    assert path_in(shared_folder) == path
    assert path_in(shared_folder, "kv-1-10") != path
    again = MappedFile(path_in(shared_folder), 4096)
    assert (again.is_new, again.buffer[:4]) == (False, b"kept")
    again.close()


def test_file_that_an_earlier_version_left_in_a_shared_folder_is_found(shared_folder):
    path = shared_folder / "kv-1-1.host"
    MappedFile(path, 4096).close()
    assert path_in(shared_folder) == path


@pytest.mark.parametrize("kind", ["readable", "link", pytest.param("foreign", marks=needs_root)])
def test_what_others_put_into_a_shared_folder_is_not_taken_for_ours(shared_folder, kind):
    theirs = shared_folder / "kv-1-1-0123456789abcdef.host"
    target = shared_folder / "target"
    MappedFile(target, 4096).close()
    if kind == "link":
        theirs.symlink_to(target)
    else:
        target.rename(theirs)
    if kind == "foreign":
        os.chown(theirs, OTHER_USER, -1)
    if kind == "readable":
        theirs.chmod(0o666)
    assert path_in(shared_folder) != theirs


@needs_root
def test_file_of_another_user_is_refused(tmp_path):
    path = tmp_path / "a"
    MappedFile(path, 4096).close()
    os.chown(path, OTHER_USER, -1)
    with pytest.raises(StorageError, match="another user"):
        MappedFile(path, 4096)


def test_link_is_refused(tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"kept")
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(StorageError, match="path"):
        MappedFile(tmp_path / "link", 4096)
    assert target.read_bytes() == b"kept"
