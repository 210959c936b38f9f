"""How long random tests go on: shortly where everything is tested, for hours with `make fuzz`."""

import os

IS_FUZZING = "KV_FUZZ_EXAMPLES" in os.environ


def examples(count):
    """Return `examples` random examples, or as many as are set."""
    return int(os.environ.get("KV_FUZZ_EXAMPLES", count))
