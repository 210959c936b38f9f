"""The entry point of `python -m router`, the same as `kv-router`."""

import sys

from router.cli import main

if __name__ == "__main__":
    sys.exit(main())
