"""Images of kernels: made once by a process with Numba, mapped here, where none is imported."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import router
from router.runtime.kernels.code_cache import sources
from router.runtime.kernels.image import (
    HEADER,
    SHIPPED_MACHINE,
    Image,
    machine,
    runs_shipped,
    shipped_path,
)
from router.runtime.kernels.numba_runtime import cache_folder

MODULE = """
import sys
from pathlib import Path
import numpy as np
from router.runtime.kernels.image_builder import image_of
from router.runtime.kernels.image_compiler import Kernel
from router.runtime.kernels.numba_runtime import device, intrinsic, kernel, kernels_to_compile

@device
def half(number):
    return number / 2

@kernel("Tuple((boolean, int64, float64))(boolean, int64, float64)")
def halves(is_half, count, number):
    return not is_half, -count, half(number)

@kernel("uint64(uint64, uint64)")
def wrapped(left, right):
    return left + right

@kernel("void(Array(uint32, 1, 'C', readonly=True), uint64[:, ::1])")
def spread(numbers, out):
    for i in range(len(numbers)):
        for j in range(out.shape[1]):
            out[i, j] = numbers[i] << np.uint64(j)

@kernel("int64(Bytes(uint8, 1, 'C'), boolean[::1])")
def zeros(text, marks):
    count = 0
    for i in range(len(text)):
        marks[i] = text[i] == 0
        count += marks[i]
    return count

@kernel("float64(float64[::1])")
def middle(values):
    copied = values.copy()
    copied.sort()
    return copied[len(copied) // 2]

@kernel("uint64(int64)")
def twice(number):
    return wrapped(number, number)

@kernel("int64(int64)")
def room(bytes_):
    return len(np.empty(bytes_, np.uint8))

names = [
    Kernel(key.partition("(")[0].rpartition(".")[2], *rest) for key, *rest in kernels_to_compile()
]
path = Path(sys.argv[1])
path.write_bytes(image_of(names, path.with_suffix(".parts"), lambda *counts: print(*counts)))
"""
KERNELS = ("halves", "wrapped", "spread", "zeros", "middle", "twice", "room")


ENDS = """
@intrinsic
def ends(context, number):
    os.kill(os.getpid(), signal.SIGKILL)

@kernel("int64(int64)")
def ended(number):
    return ends(number)
"""


def make(folder, text):
    """Make an image of a module's kernels in a process with Numba; return the process."""
    (folder / "kernels.py").write_text(text)
    command = [sys.executable, folder / "kernels.py", folder / "kernels.image"]
    environment = os.environ | {"KV_ROUTER_KERNELS": "image"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image")
    made = make(folder, MODULE)
    assert made.returncode == 0, made.stderr
    return folder / "kernels.image"


def test_a_kernel_that_cannot_be_compiled_is_named_and_those_before_it_are_kept(tmp_path):
    wrong = MODULE.replace("return left + right", "return left.missing")
    failed = make(tmp_path, wrong)
    assert failed.returncode == 1
    assert "kernels are not compiled (wrapped" in failed.stderr.splitlines()[-1]
    assert not (tmp_path / "kernels.image").exists()
    made = make(tmp_path, MODULE)
    assert made.returncode == 0, made.stderr
    assert made.stdout.splitlines()[0] == f"1 {len(KERNELS)}"
    assert Image(tmp_path / "kernels.image", machine()).function("wrapped")(2, 3) == 5
    assert not (tmp_path / "kernels.parts").exists()


def test_a_compiling_process_that_is_killed_is_an_error_that_says_so(tmp_path):
    head, rest = MODULE.split("names = [")
    killed = make(tmp_path, f"import os, signal\n{head}{ENDS}names = [{rest}")
    assert killed.returncode == 1
    assert "a process was killed by signal 9" in killed.stderr.splitlines()[-1]
    assert not (tmp_path / "kernels.image").exists()


def test_a_kernel_calls_another_with_its_declared_signature(kernels):
    assert kernels["twice"](-1) == 2**64 - 2


@pytest.fixture(scope="module")
def kernels(path):
    image = Image(path, machine())
    return {name: image.function(name) for name in KERNELS}


def test_numbers_pass_in_both_directions(kernels):
    assert kernels["halves"](False, 3, 5.0) == (True, -3, 2.5)
    assert kernels["halves"](np.True_, np.int64(-3), np.float64(5)) == (False, 3, 2.5)
    assert kernels["wrapped"](2**64 - 1, np.uint64(3)) == 2


def test_arrays_are_read_and_written_in_place(kernels):
    out = np.zeros((3, 2), np.uint64)
    numbers = np.arange(3, dtype=np.uint32)
    numbers.setflags(write=False)
    assert kernels["spread"](numbers, out) is None
    assert out.tolist() == [[0, 0], [1, 2], [2, 4]]
    marks = np.zeros(3, np.bool_)
    assert (kernels["zeros"](b"\0a\0", marks), marks.tolist()) == (2, [True, False, True])


def test_memory_of_a_kernel_is_freed_when_it_returns(kernels):
    values = np.arange(500_000, dtype=np.float64)[::-1].copy()
    before = _resident_bytes()
    for _ in range(50):
        assert kernels["middle"](values) == 250_000
    assert _resident_bytes() - before < 40e6


def test_memory_that_is_not_there_is_an_error(kernels):
    assert kernels["room"](1000) == 1000
    with pytest.raises(MemoryError):
        kernels["room"](1 << 60)


F64, U64 = np.zeros((2, 2)), np.zeros((2, 2), np.uint64)
WRONG = {
    "too few": ((), "takes 2 arguments"),
    "no array": (([1], U64), "argument 1 an array"),
    "type": ((F64[0], U64), "argument 1 an array"),
    "dimensions": ((np.zeros(2, np.uint32), U64[0]), "argument 2 an array"),
    "order": ((np.zeros(2, np.uint32), U64.T), "argument 2 an array"),
}


@pytest.mark.parametrize(("arguments", "problem"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_a_type_error(kernels, arguments, problem):
    with pytest.raises(TypeError, match=problem):
        kernels["spread"](*arguments)


def test_an_array_that_may_not_be_written_is_refused(kernels):
    out = np.zeros((2, 2), np.uint64)
    out.setflags(write=False)
    with pytest.raises(TypeError, match="argument 2"):
        kernels["spread"](np.zeros(2, np.uint32), out)


@pytest.mark.parametrize(
    ("kernel", "arguments"),
    [("halves", (False, "3", 5.0)), ("halves", (False, 3, "5")), ("wrapped", (1.5, 1)),
     ("zeros", ("text", np.zeros(4, np.bool_)))],
)  # fmt: skip
def test_a_value_that_is_no_number_is_a_type_error(kernels, kernel, arguments):
    with pytest.raises(TypeError):
        kernels[kernel](*arguments)


def test_a_number_that_does_not_fit_is_an_overflow(kernels):
    with pytest.raises(OverflowError):
        kernels["wrapped"](-1, 1)
    with pytest.raises(OverflowError):
        kernels["halves"](True, 2**63, 1.0)


def test_a_damaged_image_is_refused(path, tmp_path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    (tmp_path / "damaged").write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        Image(tmp_path / "damaged", machine())


@pytest.mark.parametrize("length", [0, 20])
def test_an_image_without_a_whole_header_is_refused(path, tmp_path, length):
    cut = tmp_path / "cut.image"
    cut.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match="damaged"):
        Image(cut, machine())


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system")
def test_an_image_where_nothing_may_be_executed_is_copied(path, tmp_path):
    script = (
        f'mount -t tmpfs -o noexec kernels {tmp_path} && cp {path} {tmp_path}/it && "$@" {tmp_path}'
    )
    program = (
        "import sys; from pathlib import Path\n"
        "from router.runtime.kernels.image import Image, machine\n"
        "print(Image(Path(sys.argv[1]) / 'it', machine()).function('wrapped')(2, 3))"
    )
    command = ["unshare", "--mount", "sh", "-ec", script, "sh", sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if "mount" in ended.stderr:
        pytest.skip("no file system may be mounted here")
    assert ended.stdout == "5\n", ended.stderr


def test_an_image_of_another_machine_is_refused(path, monkeypatch):
    monkeypatch.setenv("NUMBA_CPU_NAME", "other")
    with pytest.raises(ValueError, match="another machine"):
        Image(path, machine())


def test_a_mapped_kernel_needs_no_numba():
    script = "import router.core.core, sys; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def shipped(content):
    """The image of this machine, as one of a package."""
    body = content[HEADER.size :]
    described_bytes = HEADER.unpack(content[: HEADER.size])[1]
    described = json.loads(body[:described_bytes]) | {"machine": SHIPPED_MACHINE}
    body = json.dumps(described).encode().ljust(described_bytes) + body[described_bytes:]
    return HEADER.pack(hashlib.sha256(body).digest(), described_bytes) + body


@pytest.mark.skipif(not runs_shipped(), reason="no processor of x86-64-v3")
def test_a_package_with_an_image_compiles_nothing(tmp_path):
    root = Path(router.__file__).parent
    shutil.copytree(root, tmp_path / "router", ignore=shutil.ignore_patterns("__pycache__"))
    place = tmp_path / "router" / shipped_path(sources()).relative_to(root)
    place.parent.mkdir()
    (image,) = cache_folder().glob("kernels-*.image")
    place.write_bytes(shipped(image.read_bytes()))
    program = (
        "import sys, router.core.core\n"
        "from router.runtime.kernels.numba_runtime import cache_folder\n"
        "print(cache_folder(), 'numba' in sys.modules)"
    )
    places = {"PYTHONPATH": tmp_path, "NUMBA_CACHE_DIR": tmp_path / "cache", "HOME": tmp_path}
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=os.environ | places,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.stdout, ended.stderr) == (f"{place.parent} False\n", "")
