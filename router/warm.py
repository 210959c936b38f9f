"""`python -m router.warm`: compile every kernel now, so that no later process has to.

For images, with NUMBA_CACHE_DIR and NUMBA_CPU_NAME=generic as at run time; see `router.compiled`.
"""

import sys

import router._short_cut_kernel
import router.indexer._grouping
import router.indexer._kernel
import router.indexer._named_kernel
import router.publisher._engine_kernel
import router.publisher._held_kernel
import router.publisher._map_kernel
import router.publisher._map_store
import router.publisher._map_whole
import router.scheduler._busy_kernel
import router.scheduler._claims_kernel
import router.scheduler._cost_kernel
import router.scheduler._gather
import router.scheduler._growth_kernel
import router.scheduler._pick_kernel
import router.scheduler._predictive_kernel
import router.scheduler._rates_kernel
import router.sequence._hash_kernel
import router.sequence._siphash
import router.sequence._token_kernel
from router.compiled import cache_folder

KERNEL_MODULES = (
    router._short_cut_kernel,
    router.indexer._grouping,
    router.indexer._kernel,
    router.indexer._named_kernel,
    router.publisher._engine_kernel,
    router.publisher._held_kernel,
    router.publisher._map_kernel,
    router.publisher._map_store,
    router.publisher._map_whole,
    router.scheduler._busy_kernel,
    router.scheduler._claims_kernel,
    router.scheduler._cost_kernel,
    router.scheduler._gather,
    router.scheduler._growth_kernel,
    router.scheduler._pick_kernel,
    router.scheduler._predictive_kernel,
    router.scheduler._rates_kernel,
    router.sequence._hash_kernel,
    router.sequence._siphash,
    router.sequence._token_kernel,
)


def main() -> int:
    """Importing has compiled them; say where they are kept."""
    where = cache_folder() or "memory only: no folder can be written"
    sys.stdout.write(f"kernels of {len(KERNEL_MODULES)} modules are compiled, in {where}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
