"""What a release is made of: packages of known version and hash, without known faults."""

import hashlib
import json
import os
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from licences import is_permissive, licence

from router.runtime.kernels.image import runs_shipped
from support.values.locks import locked

ROOT = Path(__file__).parents[2]
LOCKS = ("router", "agent")

pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    folder = tmp_path_factory.mktemp("release") / "dist"
    subprocess.run(["make", "-s", "dist", f"DIST={folder}"], cwd=ROOT, check=True)
    return folder


def test_release_has_checksums_of_all_its_files(released):
    sums = dict(
        reversed(line.split()) for line in (released / "SHA256SUMS").read_text().splitlines()
    )
    files = [path for path in released.iterdir() if path.name != "SHA256SUMS"]
    wheels = 1 + runs_shipped()  # the second one has compiled kernels
    assert len(files) == wheels + 2 + len(LOCKS)
    assert sums == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("lock", LOCKS)
def test_bill_of_materials_names_every_package_with_its_hashes(lock, released):
    bill = json.loads((released / f"kv-router-{lock}.cdx.json").read_text())
    assert bill["metadata"]["component"]["name"] == "kv-router"
    listed = {
        each["name"]: (
            each["version"],
            {found["content"] for place in each["externalReferences"] for found in place["hashes"]},
        )
        for each in bill["components"]
    }
    assert listed == locked(lock)


@pytest.mark.parametrize("lock", LOCKS)
def test_no_package_has_a_known_vulnerability(lock):
    audit = Path(os.environ["RELEASE_PYTHON"]).with_name("pip-audit")
    done = subprocess.run(
        [audit, "--disable-pip", "--require-hashes", "--progress-spinner=off", "--format=json",
         "--requirement", ROOT / f"deploy/images/{lock}.txt"],
        stdout=subprocess.PIPE, check=False,
    )  # fmt: skip
    if not done.stdout:
        pytest.skip("the advisory service of PyPI does not answer: nothing is known")
    found = json.loads(done.stdout)["dependencies"]
    unknown = [each["name"] for each in found if "skip_reason" in each]
    if len(unknown) == len(found):
        pytest.skip("the advisory service of PyPI knows no package: nothing is known")
    assert not unknown
    assert not {each["name"]: each["vulns"] for each in found if each["vulns"]}


def test_what_the_router_image_installs_is_permissively_licensed(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", tmp_path / "bin/python", "install", "--quiet",
         "--require-hashes", "--requirement", ROOT / "deploy/images/router.txt"],
        check=True,
    )  # fmt: skip
    (folder,) = (tmp_path / "lib").glob("*/site-packages")
    named = {each.name: licence(each) for each in distributions(path=[str(folder)])}
    assert {re.sub("[-_.]+", "-", name).lower() for name in named} <= {*locked("router")}
    assert not {name: each for name, each in named.items() if not is_permissive(each)}
