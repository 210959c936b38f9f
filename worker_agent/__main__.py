"""`python -m worker_agent`, the same as `kv-worker-agent`."""

import sys

from worker_agent.cli import main

if __name__ == "__main__":
    sys.exit(main())
