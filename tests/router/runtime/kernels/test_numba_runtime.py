"""Kernels kept on disk: processes of their own compile and load two small ones."""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from support.processes.forking import template

MODULE = """
from numba.core import config
config.reload_config()  # the environment is not the one that Numba was imported with
import json
from router.runtime.kernels import numba_runtime

@numba_runtime.kernel("int64(int64)")
def double(number):
    return number * 2

@numba_runtime.kernel("int64(int64)")
def triple(number):
    return number * 3

def total(counters):
    return sum(sum(counter.values()) for counter in counters)

assert (double(2), triple(2)) == (4, 6)
stats = [double.stats, triple.stats]
print(json.dumps({
    "folder": numba_runtime.cache_folder() and str(numba_runtime.cache_folder()),
    "loaded": total(each.cache_hits for each in stats),
    "compiled": total(each.cache_misses for each in stats),
}))
"""
OTHER_USER = 65534
WITHOUT_NAME = 4242
"""A user id that no system knows."""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give files away")


def as_user(uid):
    """Another user with read access to everything: the interpreter may lie in root's home."""
    caps = "+dac_read_search"
    ids = [f"--reuid={uid}", "--clear-groups"]
    return ["setpriv", *ids, f"--inh-caps={caps}", f"--ambient-caps={caps}"]


def obeying_modes():
    """For root, modes of files are no obstacle, unless this is taken away."""
    lost = "-dac_override"
    return ["setpriv", f"--bounding-set={lost}", f"--inh-caps={lost}"] if os.getuid() == 0 else []


class Programs:
    """Runs the module, always at the same place, with a home and a temporary folder of its own."""

    def __init__(self, root):
        self.root, self.module = root, root / "kernels.py"
        self.home, self.temporary, self.chosen = (root / n for n in ("home", "tmp", "chosen"))
        self.module.write_text(MODULE)
        for folder in (self.home, self.temporary):
            folder.mkdir()

    def environment(self, **changes):
        foreign = ("NUMBA_", "XDG_", "TMPDIR")
        ours = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        ours |= {"HOME": self.home, "TMPDIR": self.temporary, "NUMBA_CACHE_DIR": self.chosen}
        ours["KV_ROUTER_KERNELS"] = "numba"
        ours |= changes
        return {key: str(value) for key, value in ours.items() if value is not None}

    def start(self, *, program=None, **environment):
        """Start a process that has imported Numba, and nothing of ours."""
        log = Path(tempfile.mkstemp(dir=self.root, suffix=".log")[1])
        started = program or self.module
        forked = template("numba").fork([], log, started, self.environment(**environment))
        return Started(forked, log)

    def begin(self, *, wrapper=(), file_size=None, **environment):
        """Start a process by a command line, as another user or with limits."""

        def limit_files():
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))

        return subprocess.Popen(
            [*wrapper, sys.executable, self.module],
            env=self.environment(**environment),
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=None if file_size is None else limit_files,
        )

    def run(self, **how):
        if {"wrapper", "file_size"} & how.keys():
            return result(self.begin(**how))
        return self.start(**how).report()

    def begin_with(self, files):
        """Forget all that was written, except these compiled files."""
        _unprotect(self.root)
        for path in self.root.iterdir():
            if path != self.module:
                path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)
        for folder in (self.home, self.temporary):
            folder.mkdir()
        for name, content in files.items():
            path = self.chosen / name
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(0o600)


class Started:
    """A forked process, and what it printed."""

    def __init__(self, forked, log):
        self._forked, self._log = forked, log

    def printed(self):
        status = self._forked.wait(timeout=60)
        return status, self._log.read_text()

    def report(self):
        status, output = self.printed()
        assert status == 0, output
        return json.loads(output.splitlines()[-1])


def result(process):
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return json.loads(output)


def outcome(report):
    return report["loaded"], report["compiled"]


def kept(folder, pattern="*.nb[ci]"):
    files = [file for file in folder.rglob(pattern) if file.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def protect(folder):
    """No user may write it any more."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)


def _unprotect(folder):
    for path in [path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink()]:
        path.chmod(0o755)


@pytest.fixture
def programs(tmp_path):
    yield Programs(tmp_path)
    _unprotect(tmp_path)


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """Programs that have run once, and the files of that."""
    programs = Programs(tmp_path_factory.mktemp("built"))
    assert outcome(programs.run()) == (0, 2)
    yield programs, kept(programs.chosen, "*")
    _unprotect(programs.root)


@pytest.fixture
def built(once):
    """Programs as they are after they have run once."""
    programs, files = once
    programs.begin_with(files)
    return programs


@pytest.fixture
def prebuilt(built):
    """The chosen folder, filled and protected, as an image has it."""
    protect(built.chosen)
    return built


def test_compiled_kernels_are_loaded_by_the_next_process(programs):
    first = programs.run()
    files = kept(programs.chosen)
    assert outcome(first) == (0, 2)
    assert Path(first["folder"]).parent == programs.chosen
    assert outcome(programs.run()) == (2, 0)
    assert kept(programs.chosen) == files


def test_without_a_choice_machine_code_lies_in_the_home(programs):
    folder = Path(programs.run(NUMBA_CACHE_DIR=None)["folder"])
    assert folder.parent == programs.home / ".cache" / "kv-router"
    assert folder.stat().st_mode & 0o777 == 0o700
    other = programs.root / "xdg"
    report = programs.run(NUMBA_CACHE_DIR=None, XDG_CACHE_HOME=other)
    assert Path(report["folder"]).parent == other / "kv-router"


DAMAGES = {
    "emptied": lambda content: content[:0],
    "cut": lambda content: content[:-1],
    "zeros within": lambda content: content[:500] + bytes(1500) + content[2000:],
    "a bit": lambda content: content[:100] + bytes([content[100] ^ 4]) + content[101:],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_files_are_compiled_anew(built, damage):
    """What is loaded unseen may end the process: machine code with zeros in it does. Of one kernel
    the code is damaged, of the other its index.
    """
    files = kept(built.chosen, "*")
    for pattern in ("*double*.nbc", "*triple*.nbi"):
        (name,) = kept(built.chosen, pattern)
        (built.chosen / name).write_bytes(damage(files[name]))
    assert outcome(built.run()) == (0, 2)
    assert outcome(built.run()) == (2, 0)
    assert set(kept(built.chosen, "*")) == set(files)


@pytest.mark.parametrize("content", [b"", b"\xff\0garbage"])
def test_files_without_a_checksum_are_compiled_anew(built, content):
    for name in kept(built.chosen, "SHA256SUMS"):
        (built.chosen / name).write_bytes(content)
    assert outcome(built.run()) == (0, 2)
    assert outcome(built.run()) == (2, 0)


def test_a_lost_file_is_compiled_anew(built):
    next(built.chosen.rglob("*.nbc")).unlink()
    assert outcome(built.run()) == (1, 1)
    assert outcome(built.run()) == (2, 0)


def test_read_only_cache_is_copied(prebuilt):
    files = kept(prebuilt.chosen)
    report = prebuilt.run(wrapper=obeying_modes())
    assert outcome(report) == (2, 0)
    assert Path(report["folder"]).parent == prebuilt.home / ".cache" / "kv-router"
    assert kept(Path(report["folder"])) == kept(next(prebuilt.chosen.iterdir())) != {}
    assert kept(prebuilt.chosen) == files
    assert outcome(prebuilt.run(wrapper=obeying_modes())) == (2, 0)


def test_a_copy_of_damage_is_not_made(prebuilt):
    for file in prebuilt.chosen.rglob("*.nbc"):
        file.chmod(0o644)
        file.write_bytes(file.read_bytes()[:-1])
    assert outcome(prebuilt.run(wrapper=obeying_modes())) == (0, 2)
    assert outcome(prebuilt.run(wrapper=obeying_modes())) == (2, 0)


@needs_root
def test_another_user_than_the_images_copies_too(prebuilt):
    for folder in (prebuilt.home, prebuilt.temporary):
        os.chown(folder, OTHER_USER, -1)
    report = prebuilt.run(wrapper=as_user(OTHER_USER))
    assert outcome(report) == (2, 0)
    assert Path(report["folder"]).parent == prebuilt.home / ".cache" / "kv-router"


def test_without_a_home_the_temporary_folder_serves(prebuilt):
    protect(prebuilt.home)
    report = prebuilt.run(wrapper=obeying_modes())
    assert Path(report["folder"]).parent == prebuilt.temporary / f"kv-router-{os.getuid()}"
    assert outcome(report) == (2, 0)


@needs_root
def test_a_user_without_a_name_has_no_home(programs):
    os.chown(programs.temporary, WITHOUT_NAME, -1)
    report = programs.run(wrapper=as_user(WITHOUT_NAME), HOME=None, NUMBA_CACHE_DIR=None)
    assert Path(report["folder"]).parent == programs.temporary / f"kv-router-{WITHOUT_NAME}"
    assert outcome(report) == (0, 2)


@needs_root
def test_with_a_temporary_folder_of_all_users_shared_memory_serves(prebuilt):
    """As in Kubernetes, where a volume at /tmp is not sticky."""
    user = 100_000 + os.getpid()
    prebuilt.temporary.chmod(0o2777)
    try:
        report = prebuilt.run(wrapper=as_user(user), HOME=None)
        assert outcome(report) == (2, 0)
        assert Path(report["folder"]).parent == Path(f"/dev/shm/kv-router-{user}")
    finally:
        shutil.rmtree(f"/dev/shm/kv-router-{user}", ignore_errors=True)


def test_processes_that_start_at_once_compile_once(programs):
    processes = [programs.start() for _ in range(4)]
    outcomes = [outcome(process.report()) for process in processes]
    assert [sum(counts) for counts in zip(*outcomes, strict=True)] == [6, 2]
    assert len(kept(programs.chosen, "*.nbc")) == 2


def test_processes_that_find_damage_at_once_heal_it(built):
    for file in built.chosen.rglob("*.nb[ci]"):
        file.write_bytes(b"")
    processes = [built.start() for _ in range(4)]
    outcomes = [outcome(process.report()) for process in processes]
    assert [sum(counts) for counts in zip(*outcomes, strict=True)] == [6, 2]


def test_where_nothing_can_be_written_kernels_live_in_memory(programs):
    for folder in (programs.chosen, programs.home, programs.temporary):
        folder.mkdir(exist_ok=True)
        protect(folder)
    process = programs.begin(wrapper=obeying_modes(), file_size=0)
    output, errors = process.communicate(timeout=60)
    assert json.loads(output)["folder"] is None
    assert "in memory: no folder" in errors
    assert kept(programs.root) == {}


@pytest.mark.parametrize("file_size", [0, 5000])
def test_on_a_full_disk_kernels_live_in_memory(programs, file_size):
    """Files can be made there, but not filled."""
    programs.run(file_size=file_size)
    assert outcome(programs.run())[1] > 0
    assert outcome(programs.run()) == (2, 0)


@needs_root
def test_cache_of_another_user_is_not_trusted(built):
    for path in [built.chosen, *built.chosen.rglob("*")]:
        os.chown(path, OTHER_USER, -1)
    report = built.run()
    assert outcome(report) == (0, 2)
    assert Path(report["folder"]).parent == built.home / ".cache" / "kv-router"


@pytest.mark.parametrize("mode", [0o777, 0o722])
def test_world_writable_cache_folder_is_not_trusted(built, mode):
    next(built.chosen.iterdir()).chmod(mode)
    report = built.run()
    assert outcome(report) == (0, 2)
    assert Path(report["folder"]).parent == built.home / ".cache" / "kv-router"


def test_cache_below_a_world_writable_folder_is_not_trusted_unless_that_is_sticky(built):
    built.chosen.chmod(0o777)
    report = built.run()
    assert outcome(report) == (0, 2)
    assert Path(report["folder"]).parent == built.home / ".cache" / "kv-router"
    built.chosen.chmod(0o1777)
    report = built.run()
    assert outcome(report) == (2, 0)
    assert Path(report["folder"]).parent == built.chosen


def _writable(file):
    file.chmod(0o666)


def _linked(file):
    target = file.with_suffix(".elsewhere")
    file.rename(target)
    file.symlink_to(target)


def _linked_folder(file):
    target = file.parents[3] / "elsewhere"
    file.parent.rename(target)
    file.parent.symlink_to(target)


def _given_away(file):
    os.chown(file, OTHER_USER, -1)


CHANGES = [_writable, _linked, _linked_folder, pytest.param(_given_away, marks=needs_root)]


@pytest.mark.parametrize("change", CHANGES)
def test_machine_code_that_others_can_change_is_not_loaded(built, change):
    change(next(built.chosen.rglob("*.nbc")))
    report = built.run()
    assert outcome(report) == (0, 2)
    assert Path(report["folder"]).parent == built.home / ".cache" / "kv-router"


def test_prebuilt_machine_code_that_others_can_change_is_not_copied(prebuilt):
    next(prebuilt.chosen.rglob("*.nbi")).chmod(0o666)
    assert outcome(prebuilt.run(wrapper=obeying_modes())) == (0, 2)


def test_whatever_the_umask_the_next_process_trusts_what_was_compiled(programs):
    unmasked = ["bash", "-c", 'umask 0; exec "$@"', "bash"]
    folder = Path(programs.run(wrapper=unmasked)["folder"])
    assert not [each for each in folder.rglob("*") if each.stat().st_mode & 0o022]
    assert outcome(programs.run(wrapper=unmasked)) == (2, 0)


def test_a_kernel_that_cannot_be_compiled_costs_the_others_nothing(built):
    files = kept(built.chosen)
    wrong = built.root / "wrong.py"
    wrong.write_text(MODULE.replace("number * 2", "number.missing"))
    status, output = built.start(program=wrong).printed()
    assert status == 1
    assert "TypingError" in output
    assert kept(built.chosen) == files
    assert outcome(built.run()) == (2, 0)


def test_leftovers_of_other_versions_are_no_obstacle(built):
    shutil.copytree(next(built.chosen.iterdir()), built.chosen / "0123456789abcdef")
    assert outcome(built.run()) == (2, 0)
