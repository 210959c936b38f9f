"""`python -m router.warm`: compile every kernel now, so that no later process has to.

`python -m router.warm --ship FOLDER` compiles them for a wheel, and prints the file's path.

For images, with NUMBA_CACHE_DIR and NUMBA_CPU_NAME=generic as at run time; see
`router.runtime.kernels.numba_runtime`, which runs this with the path of an image to make.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from router.runtime.kernels.code_cache import sources
from router.runtime.kernels.image import SHIPPED_MACHINE, is_supported, shipped_path

SAID_EVERY_S = 5.0


def kernel_modules() -> Iterator[str]:
    """Yield the names of all kernel modules: those whose file name begins with one underscore."""
    root = Path(__file__).parent
    for path in sorted(root.rglob("_[!_]*.py")):
        yield ".".join(("router", *path.relative_to(root).with_suffix("").parts))


def main(arguments: list[str]) -> int:
    """Import every kernel module, which compiles it, and print the cache folder.

    With a path: write an image of all kernels there.
    """
    if arguments[:1] == ["--ship"]:
        return _ship(Path(arguments[1]))
    names = list(kernel_modules())
    for name in names:
        import_module(name)
    if arguments:
        return _write_image(Path(arguments[0]))
    from router.runtime.kernels.numba_runtime import cache_folder

    where = cache_folder() or "memory only: no folder is writable"
    sys.stdout.write(f"kernels of {len(names)} modules are compiled, in {where}\n")
    return 0


def _ship(folder: Path) -> int:
    """Have another process make the image of a package, unless it is there; print its path."""
    if not is_supported():
        sys.stderr.write("kv-router: images of kernels are for CPython on x86-64 Linux\n")
        return 1
    path = folder.resolve() / shipped_path(sources()).name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        changes = {"KV_ROUTER_KERNELS": "image", "NUMBA_CPU_NAME": SHIPPED_MACHINE}
        subprocess.run(  # noqa: S603 - this interpreter, and a path of ours
            [sys.executable, "-m", "router.warm", str(path)],
            env=os.environ | changes | {"NUMBA_CPU_FEATURES": ""}, check=True,
        )  # fmt: skip
    sys.stdout.write(f"{path}\n")
    return 0


def _write_image(path: Path) -> int:
    from router.runtime.kernels.image_builder import image_of
    from router.runtime.kernels.image_compiler import CompilationError, Kernel
    from router.runtime.kernels.numba_runtime import kernels_to_compile

    kernels = [Kernel(*each) for each in kernels_to_compile()]
    try:
        content = image_of(kernels, path.with_suffix(".parts"), _Progress().show)
    except CompilationError as error:
        sys.stderr.write(f"kv-router: {error}\n")
        return 1
    # A file of its own: the process that asked for the image and holds the lock may be killed, and
    # the next begins another. Two that wrote to one file would change code that others have mapped.
    handle, made = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.chmod(made, 0o644)
        os.replace(made, path)
    except BaseException:
        os.unlink(made)
        raise
    return 0


class _Progress:
    """Says now and then how many kernels are compiled, and at the end."""

    def __init__(self) -> None:
        self._began_s = self._said_s = time.monotonic()

    def show(self, done: int, count: int) -> None:
        now_s = time.monotonic()
        if done < count and now_s - self._said_s < SAID_EVERY_S:
            return
        self._said_s = now_s
        sys.stderr.write(
            f"kv-router: {done} of {count} kernels are compiled, {now_s - self._began_s:.0f} s\n"
        )
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
