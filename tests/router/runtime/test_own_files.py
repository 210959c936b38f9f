"""Folders and files of this user alone: real folders, and processes of other users."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from router.errors import ConfigError
from router.runtime.own_files import (
    exclusive_dir,
    foreign_in,
    make_own_dir,
    open_own,
    trusted,
    write_own,
)

OTHER_USER, ITS_GROUP = 65534, 4242
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give files away")

# The interpreter may lie in root's home: it is loaded first.
AS_OTHER = f"""
import os, sys
from pathlib import Path
from router.errors import ConfigError
from router.runtime.own_files import exclusive_dir
os.setgroups([{ITS_GROUP}]); os.setgid({ITS_GROUP}); os.setuid({OTHER_USER}); os.umask(0)
try:
    with exclusive_dir(Path(sys.argv[1]), "engines"):
        print("ours")
except ConfigError as error:
    print(error)
"""


@pytest.fixture
def no_umask():
    former = os.umask(0)
    yield
    os.umask(former)


def mode(path):
    return path.stat().st_mode & 0o777


def refusal_of(folder):
    with pytest.raises(ConfigError) as refusal, exclusive_dir(folder):
        pass
    assert refusal.value.key == "data_dir"
    return str(refusal.value)


@pytest.mark.usefixtures("no_umask")
def test_whatever_the_umask_what_is_created_is_of_this_user_only(tmp_path):
    folder = tmp_path / "a" / "b"
    with exclusive_dir(folder, "engines"):
        write_own(folder / "state", b"x")
    for each in (tmp_path / "a", folder, folder / "engines"):
        assert mode(each) == 0o700
    for each in (folder / "lock", folder / "state"):
        assert mode(each) == 0o600


def test_folder_in_use_is_refused_and_free_afterwards(tmp_path):
    with exclusive_dir(tmp_path / "a"):
        assert "in use" in refusal_of(tmp_path / "a")
    with exclusive_dir(tmp_path / "a"):
        pass


@pytest.mark.parametrize("bits", [0o777, 0o757, 0o1777])
def test_folder_that_others_can_write_to_is_refused(tmp_path, bits):
    folder = tmp_path / "a"
    folder.mkdir()
    folder.chmod(bits)
    said = refusal_of(folder)
    assert "all users can write to it" in said
    assert str(folder) in said


def test_folder_above_that_others_can_write_to_is_refused_unless_it_is_sticky(tmp_path):
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o777)
    assert f"{above}: all users can write to it" in refusal_of(above / "a")
    above.chmod(0o1777)
    with exclusive_dir(above / "a"):
        assert trusted(above / "a") == above / "a"


@needs_root
def test_folder_of_another_user_is_refused_and_so_is_one_below_it(tmp_path):
    folder = tmp_path / "theirs"
    (folder / "ours").mkdir(parents=True)
    os.chown(folder, OTHER_USER, -1)
    assert "another user" in refusal_of(folder)
    assert "another user" in refusal_of(folder / "ours")


def test_path_is_examined_where_its_links_lead(tmp_path):
    """As `/tmp` of macOS is a link to `/private/tmp`."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert trusted(tmp_path / "link") == tmp_path / "real"
    (tmp_path / "real").chmod(0o777)
    with pytest.raises(PermissionError, match="all users"):
        trusted(tmp_path / "link")


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_lock_and_subfolders_are_no_links(tmp_path, kind):
    folder, target = tmp_path / "a", tmp_path / "target"
    folder.mkdir()
    target.write_text("kept")
    os.mkfifo(folder / "lock") if kind == "fifo" else (folder / "lock").symlink_to(target)
    refusal_of(folder)
    (folder / "lock").unlink()
    (tmp_path / "elsewhere").mkdir()
    (folder / "engines").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError), exclusive_dir(folder, "engines"):
        pass
    assert target.read_text() == "kept"


@needs_root
@pytest.mark.parametrize(
    ("group", "said"),
    [(ITS_GROUP, "ours"), (OTHER_USER - 1, "its group can write to it")],
    ids=["fsGroup", "another group"],
)
def test_volume_of_the_processs_own_group_serves(group, said):
    """As Kubernetes mounts it: of root, writable by the group that the process alone is in."""
    with ExitStack() as stack:
        folder = Path("/tmp") / f"kv-test-{os.getpid()}-{group}"
        folder.mkdir()
        stack.callback(subprocess.run, ["rm", "-r", folder], check=True)
        os.chown(folder, 0, group)
        folder.chmod(0o2775)
        source = Path(__file__).parents[3]
        done = subprocess.run(
            [sys.executable, "-c", AS_OTHER, folder],
            env={**os.environ, "PYTHONPATH": str(source)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert said in done.stdout, done.stderr
        if said == "ours":
            assert mode(folder / "lock") == 0o600
            assert mode(folder / "engines") == 0o700


@needs_root
def test_file_of_another_user_is_not_opened(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"theirs")
    os.chown(path, OTHER_USER, -1)
    with pytest.raises(PermissionError, match="another user"):
        open_own(path, os.O_RDWR)


def test_file_left_readable_by_an_earlier_version_is_closed_to_others(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    path.chmod(0o644)
    write_own(path, b"new")
    assert mode(path) == 0o600


def test_entries_that_others_can_change_are_found_at_any_depth_and_links_too(tmp_path):
    deep = tmp_path / "a" / "b"
    make_own_dir(deep)
    write_own(deep / "good", b"")
    assert foreign_in(tmp_path) == []
    write_own(deep / "bad", b"")
    (deep / "bad").chmod(0o666)
    (deep / "link").symlink_to("good")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "away").symlink_to("/")
    expected = [deep / "bad", deep / "link", tmp_path / "open", tmp_path / "away"]
    assert sorted(foreign_in(tmp_path)) == sorted(expected)
