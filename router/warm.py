"""`python -m router.warm`: compile every kernel now, so that no later process has to.

For images, with NUMBA_CACHE_DIR and NUMBA_CPU_NAME=generic as at run time; see `router.compiled`.
"""

import sys

import router.indexer._kernel
import router.sequence._hash_kernel
from router.compiled import cache_folder

KERNEL_MODULES = (router.indexer._kernel, router.sequence._hash_kernel)


def main() -> int:
    """Importing has compiled them; say where they are kept."""
    names = ", ".join(module.__name__ for module in KERNEL_MODULES)
    sys.stdout.write(f"{names}: in {cache_folder() or 'memory only, nothing can be written'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
