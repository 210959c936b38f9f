"""The Dockerfile's steps are possible, and what they make answers its own health check."""

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from support.processes.servers import free_port, until
from support.values.locks import locked

ROOT = Path(__file__).parents[2]
TARGETS = ("router", "bridge", "worker-agent")
COMPOSE = [yaml.safe_load(p.read_text()) for p in sorted((ROOT / "deploy").glob("compose*.yaml"))]


def _read():
    """Arguments before the first stage; and of each stage, its base and (instruction, rest)."""
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text()))
    defaults, stages, current = {}, {}, None
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            current = []
            stages[name] = (base, current)
        elif current is None:
            defaults.update([rest.split("=", 1)])
        else:
            current.append((word, rest))
    return defaults, stages


DEFAULTS, STAGES = _read()


def every(stage):
    """Its steps, those of the stage that it begins with before its own."""
    base, own = STAGES[stage]
    return [*(every(base) if base in STAGES else ()), *own]


def steps(stage, word):
    return [rest for each, rest in every(stage) if each == word]


def environment(stage):
    said = " ".join(steps(stage, "ENV"))
    return dict(each.split("=", 1) for each in shlex.split(said))


def test_bases_are_pinned_and_known():
    for base, _ in STAGES.values():
        argument = re.fullmatch(r"\$\{(\w+)\}", base)
        image = DEFAULTS[argument.group(1)] if argument else base
        assert base in STAGES or re.fullmatch(r"\S+:\d+\.\d+\.\d+-slim-\w+", image)


def test_whatever_is_copied_is_there():
    ignored = (ROOT / ".dockerignore").read_text().split()
    for name in STAGES:
        for copy in steps(name, "COPY"):
            *sources, _ = [each for each in copy.split() if not each.startswith("--")]
            stage = re.search(r"--from=(\S+)", copy)
            if stage:
                earlier = list(STAGES)[: list(STAGES).index(name)]
                assert stage.group(1) in earlier
                made = " ".join(steps(stage.group(1), "RUN"))
                assert all(source in made for source in sources)
            else:
                assert all((ROOT / source).exists() for source in sources)
                assert all(_is_sent(source, ignored) for source in sources)


def _is_sent(source, ignored):
    sent = True
    paths = [source, *map(str, Path(source).parents)]
    for pattern in ignored:
        if any(fnmatch.fnmatch(path, pattern.removeprefix("!")) for path in paths):
            sent = pattern.startswith("!")
    return sent


@pytest.mark.parametrize("target", TARGETS)
def test_images_are_small_and_confined(target):
    words = [word for word, _ in every(target)]
    users = steps(target, "USER")
    assert users[-1] == "10001"
    assert "--uid 10001" in " ".join(steps(target, "RUN"))
    assert words.index("HEALTHCHECK") > words.index("EXPOSE")
    assert not any("pip" in run for run in steps(target, "RUN"))


def versions_of(lock):
    return {name: version for name, (version, _) in locked(lock).items()}


@pytest.mark.parametrize("lock", ["build", "router", "agent"])
def test_every_locked_package_has_hashes(lock):
    assert all(hashes for _, hashes in locked(lock).values())


def test_images_install_packages_by_hash_alone():
    for stage in ("wheel", "installed", "installed-agent"):
        for install in re.findall(r"install (.*?)(?:&&|$)", " ".join(steps(stage, "RUN"))):
            assert "--require-hashes" in install or "--no-index" in install
    assert "--no-build-isolation" in " ".join(steps("wheel", "RUN"))


@pytest.mark.parametrize(
    ("lock", "extras"),
    [
        ("router", {"epp", "forward", "nkeys", "otel", "redis"}),
        ("agent", {"agent", "nkeys", "redis"}),
    ],
)
def test_images_have_every_package_that_a_setting_may_need(lock, extras):
    """But NIXL's 210 MB, which engines' images have; without it `share_nixl` is refused."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    without = {"dev", "nixl"} | ({"epp", "forward", "otel"} if "agent" in extras else {"agent"})
    assert extras == {*optional} - without
    asked = map(Requirement, sum([optional[each] for each in extras], project["dependencies"]))
    versions = versions_of(lock)
    assert all(each.specifier.contains(versions[each.name]) for each in asked)


@pytest.mark.parametrize("lock", ["router", "agent"])
def test_images_have_the_versions_that_were_tested(lock):
    lines = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
    tested = dict(each.split("==") for each in lines if "==" in each)
    versions = versions_of(lock)
    assert {name: tested.get(name, version) for name, version in versions.items()} == versions


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_of_an_image_can_be_read_by_its_user_and_written_by_root_only(target):
    """They are compiled by root, in folders for root only."""
    (warming,) = [run for run in steps(target, "RUN") if "router.warm" in run]
    assert warming.endswith('&& chmod -R go+rX,go-w "$NUMBA_CACHE_DIR"')


@pytest.mark.parametrize("target", TARGETS)
def test_commands_are_those_of_the_package(target):
    project = (ROOT / "pyproject.toml").read_text()
    scripts = re.search(r"\[project.scripts\]\n(.*?)\n\n", project, re.S).group(1)
    known = set(re.findall(r"^(\S+) =", scripts, re.M))
    (entry,) = map(json.loads, steps(target, "ENTRYPOINT"))
    (health,) = [json.loads(each.partition("CMD ")[2]) for each in steps(target, "HEALTHCHECK")]
    assert {entry[0], health[0]} <= known
    assert health[1:] == ["health"]


def test_services_are_confined_and_wait_for_the_bus_if_there_is_one():
    for each in COMPOSE:
        buses = {"nats": {"condition": "service_healthy"}} if "nats" in each["services"] else {}
        for service in each["services"].values():
            if "build" in service:
                assert service["build"]["target"] in TARGETS
                assert (ROOT / "deploy" / service["build"]["context"]).resolve() == ROOT
                assert service["read_only"]
                assert service["cap_drop"] == ["ALL"]
                assert buses.items() <= service.get("depends_on", {}).items()
        assert all("healthcheck" in each["services"][bus] for bus in buses)


def build(folder):
    """Carry out the steps of the router's stages, below a folder."""
    source, elsewhere = folder / "src", folder / "root"
    source.mkdir()
    elsewhere.mkdir()
    for stage in ("wheel", "installed", "router"):
        for word, rest in every(stage):
            if word == "COPY" and "--from" not in rest:
                *names, target = rest.split()
                for name in names:
                    at = target.startswith("/")
                    _copy(ROOT / name, Path(_below(folder, target)) if at else source / name)
            elif word == "RUN" and not rest.startswith("useradd"):
                at = source if stage == "wheel" else elsewhere
                _run(_below(folder, rest), at, _environment(folder))


def _below(folder, text):
    for path in ("/opt/kv-router", "/build", "/wheels", "/locks"):
        text = re.sub(rf"(?<!\S){path}", f"{folder}{path}", text)
    return text.replace("python3 ", f"{sys.executable} ")


@pytest.mark.image
@pytest.mark.timeout(1800)
def test_the_routers_steps_make_a_router_that_is_healthy(tmp_path):
    """In a folder instead of a container: the paths of the file are put below it."""

    build(tmp_path)
    port = free_port()
    env = _environment(tmp_path) | {"KV_ROUTER_HTTP_PORT": str(port)}
    env |= {"KV_ROUTER_INSECURE_PUBLIC_BIND": "true", "KV_ROUTER_HOST": "0.0.0.0"}
    bin_folder = tmp_path / "opt/kv-router/venv/bin"
    assert not list((tmp_path / "opt/kv-router/venv/lib").glob("*/site-packages/torch"))
    assert not (bin_folder / "pip").exists()
    extras = "import redis, nkeys, tokenizers, jinja2, opentelemetry.sdk"
    _run(f"python -c '{extras}'", tmp_path, env)
    serving = subprocess.Popen([bin_folder / "kv-router", "serve"], env=env, cwd=tmp_path)
    try:
        command = [bin_folder / "kv-router", "health", "serve"]

        def is_healthy():
            assert serving.poll() is None
            return not subprocess.run(command, env=env, cwd=tmp_path, check=False).returncode

        until(is_healthy, 300, poll_s=0.5)
    finally:
        serving.terminate()
        assert serving.wait(60) == 0


def _environment(folder):
    said = environment("router")
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KV_ROUTER")}
    kept.pop("PYTHONPATH", None)
    path = f"{folder}{said['PATH'].replace('$PATH', kept['PATH'])}"
    kernels = f"{folder}{said['NUMBA_CACHE_DIR']}"
    return {**kept, **said, "PATH": path, "NUMBA_CACHE_DIR": kernels}


def _copy(source, target):
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def _run(command, folder, env):
    subprocess.run(["bash", "-euc", command], cwd=folder, env=env, check=True)
