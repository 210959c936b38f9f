"""`python -m router.warm`: compile every kernel now, so that no later process has to.

For images, with NUMBA_CACHE_DIR and NUMBA_CPU_NAME=generic as at run time; see
`router.runtime.kernels.numba_runtime`, which runs this with the path of an image to make.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from router.runtime.kernels.numba_runtime import built_kernels, cache_folder


def kernel_modules() -> Iterator[str]:
    """Yield the names of all kernel modules: those whose file name begins with one underscore."""
    root = Path(__file__).parent
    for path in sorted(root.rglob("_[!_]*.py")):
        yield ".".join(("router", *path.relative_to(root).with_suffix("").parts))


def main(arguments: list[str]) -> int:
    """Import every kernel module, which compiles it, and print the cache folder.

    With a path: write what was compiled there, as an image.
    """
    names = list(kernel_modules())
    for name in names:
        import_module(name)
    if arguments:
        _write_image(Path(arguments[0]))
    where = cache_folder() or "memory only: no folder is writable"
    sys.stdout.write(f"kernels of {len(names)} modules are compiled, in {where}\n")
    return 0


def _write_image(path: Path) -> None:
    from router.runtime.kernels.image_builder import image_of

    content = image_of(built_kernels())
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
