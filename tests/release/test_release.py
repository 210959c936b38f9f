"""A wheel and a source distribution, which install alone, and say what they are."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from router.runtime.kernels.image import runs_shipped
from support.processes.servers import free_port, until

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("RELEASE_PYTHON", sys.executable)
INSTALL = (ROOT / "docs/install.md").read_text()
PACKAGES = ("router", "worker_agent")
START_S = 1200.0  # packages may have to be installed and kernels compiled first

pytestmark = [pytest.mark.release, pytest.mark.timeout(2 * START_S)]


def run(*command, **options):
    return subprocess.run(list(map(str, command)), check=True, text=True, **options)


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    run(PYTHON, "-m", "build", "--outdir", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    (source,) = folder.glob("*.tar.gz")
    return wheel, source


@pytest.fixture(scope="session")
def environment(built, tmp_path_factory):
    """A fresh virtual environment that has the wheel, and what it requires."""
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin/pip", "install", "--quiet", built[0])
    return folder / "bin"


def settings(tmp_path):
    """Those of a user: neither our source nor our settings."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("KV_ROUTER", "DYN_", "PYTHON"))
    }
    return kept | {"PIPX_HOME": str(tmp_path / "pipx"), "PIPX_BIN_DIR": str(tmp_path / "bin")}


def files_of(wheel):
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def tracked():
    listed = run("git", "ls-files", *PACKAGES, cwd=ROOT, stdout=subprocess.PIPE).stdout
    return set(listed.split())


def test_both_can_be_published(built):
    run(PYTHON, "-m", "twine", "check", "--strict", *built)


def test_the_wheel_is_the_packages_with_their_data_and_no_more(built):
    wheel, _ = built
    assert files_of(wheel) == tracked()
    assert {f"{package}/py.typed" for package in PACKAGES} <= files_of(wheel)
    names = zipfile.ZipFile(wheel).namelist()
    licences = {Path(name).name for name in names if "/licenses/" in name}
    assert licences == {"LICENSE", "THIRD_PARTY.md"}


def test_the_source_makes_the_same_wheel(built, tmp_path):
    wheel, source = built
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
        tops = {name.split("/")[1] for name in archive.getnames() if name.count("/")}
    assert not {"tests", "benchmarks", "deploy"} & tops
    (unpacked,) = tmp_path.iterdir()
    run(PYTHON, "-m", "build", "--wheel", "--outdir", tmp_path / "again", unpacked)
    (again,) = (tmp_path / "again").glob("*.whl")
    assert files_of(again) == files_of(wheel)


def test_torch_is_not_needed(environment):
    listed = run(environment / "pip", "list", stdout=subprocess.PIPE).stdout
    assert not re.search(r"^(torch|redis|pytest|opentelemetry-sdk) ", listed, re.MULTILINE)


def test_every_command_says_how_it_is_used(environment, tmp_path):
    usage = run(environment / "kv-router", "--help", stdout=subprocess.PIPE).stdout
    for name in re.findall(r"^  (\w+) ", usage, re.MULTILINE):
        run(environment / "kv-router", name, "--help", cwd=tmp_path, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("command", [("kv-router", "up"), ("kv-worker-agent", "run")])
def test_what_needs_an_extra_names_it(command, environment, tmp_path):
    program, *words = command
    env = settings(tmp_path) | {"PATH": str(environment)}  # which has no nats-server
    refused = subprocess.run(
        [environment / program, *words],
        env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "kv-router[agent]" in refused.stderr


def test_a_router_serves(environment, tmp_path):
    serves(environment / "kv-router", "serve", tmp_path)


def serves(*command_and_folder):
    *command, folder = command_and_folder
    port, env = free_port(), settings(folder)
    flag = "--port" if "up" in command else "--http-port"
    process = subprocess.Popen([*map(str, command), flag, str(port)], env=env, cwd=folder)
    try:
        wait_until_healthy(port, process)
    finally:
        process.terminate()
        status = process.wait(START_S)
    assert status == 0


def wait_until_healthy(port, process):
    def is_healthy():
        assert process.poll() is None
        asked = ["curl", "-sf", f"localhost:{port}/health"]
        return not subprocess.run(asked, check=False).returncode

    until(is_healthy, START_S, poll_s=0.5)


@pytest.mark.skipif(not runs_shipped(), reason="no processor of x86-64-v3")
def test_a_wheel_with_compiled_kernels_starts_without_compiling(tmp_path):
    made = [sys.executable, "-m", "router.warm", "--ship", tmp_path]
    image = run(*made, cwd=ROOT, stdout=subprocess.PIPE).stdout.strip()
    packed = [PYTHON, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT]
    run(*packed, env=os.environ | {"KV_ROUTER_SHIPPED_KERNELS": image})
    (wheel,) = tmp_path.glob("*.whl")
    tag = sys.implementation.cache_tag.replace("cpython-", "cp")
    assert wheel.name.endswith(f"-{tag}-{tag}-manylinux_2_28_x86_64.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    run(tmp_path / "venv/bin/pip", "install", "--quiet", wheel)
    env = settings(tmp_path) | {"HOME": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    program = "import sys, router.core.core; print('numba' in sys.modules)"
    ended = subprocess.run(
        [tmp_path / "venv/bin/python", "-c", program], env=env, cwd=tmp_path,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (ended.stdout, ended.stderr) == ("False\n", "")


ONE_LINERS = re.findall(r"^\$ pipx run (.*?)(?: +#.*)?$", INSTALL, re.MULTILINE)


@pytest.mark.parametrize("line", ONE_LINERS)
def test_one_liners_work_from_the_wheel(line, built, tmp_path):
    """The wheel stands for the clone."""
    wheel, _ = built
    extras, words = re.fullmatch(r"--spec '?\.(\[[\w,]+\])?'? kv-router(.*)", line).groups()
    spec = f"kv-router{extras or ''} @ {wheel.as_uri()}"
    command = [PYTHON, "-m", "pipx", "run", "--spec", spec, "kv-router", *words.split()]
    if words.split()[0] in ("serve", "up", "indexer"):
        serves(*command, tmp_path)
    else:
        run(*command, env=settings(tmp_path), cwd=tmp_path)
