"""`python -m router.warm`: compile every kernel now, so that no later process has to.

For images, with NUMBA_CACHE_DIR and NUMBA_CPU_NAME=generic as at run time; see
`router.runtime.kernels.numba_runtime`.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from router.runtime.kernels.numba_runtime import cache_folder


def kernel_modules() -> Iterator[str]:
    """Yield the names of all kernel modules: those whose file name begins with one underscore."""
    root = Path(__file__).parent
    for path in sorted(root.rglob("_[!_]*.py")):
        yield ".".join(("router", *path.relative_to(root).with_suffix("").parts))


def main() -> int:
    """Import every kernel module, which compiles it, and print the cache folder."""
    names = list(kernel_modules())
    for name in names:
        import_module(name)
    where = cache_folder() or "memory only: no folder is writable"
    sys.stdout.write(f"kernels of {len(names)} modules are compiled, in {where}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
