"""The most requests that ranks can serve, from their predicted seconds.

An engine batches: each step takes its base time once for all requests in it, so the seconds that a
request takes depend on how many run beside it. What a rank can serve at most is the rate at which
it works all the time with as many requests as its memory holds:

    seconds of a request = prompt tokens · prefill_s + attention work · context_s
                         + output tokens · (decode_s + (prompt + output / 2) · kv_s)
                         + base_s · max(output tokens / requests at once, prompt tokens / chunk)
    most requests per second = 1 / seconds of a request

A rank that serves half as many needs no more than half of these seconds, though it is busy for more
of its time, in steps with fewer requests. So demand in seconds is linear in the requests, as
scalers expect, and a saturation of 1 is the fleet's full throughput, not its first busy second.
"""

import numpy as np
from msgspec import Struct

from router.scheduler.capacity.arrivals import (
    CONTEXTS,
    HELD_BLOCKS,
    HELD_REQUESTS,
    ISL_TOKENS,
    REQUESTS,
    TOKENS,
)
from router.scheduler.terms import FloatArray
from router.sequence.rank_table import (
    BASE_S,
    BLOCK_SIZE,
    CAPACITY_BLOCKS,
    CHUNK_TOKENS,
    CONTEXT_S,
    DECODE_S,
    KV_S,
    PREFILL_S,
)


class Requests(Struct, frozen=True, eq=False):
    """The mean request of each of several windows; one window per row, in arrays of one column.

    `tokens` are computed, with the attention work `contexts`, of a prompt of `isl_tokens`; then
    `output_tokens` are generated in steps. `held_blocks`: of a running request, shared blocks
    divided among those that share them; NaN if none was running.
    """

    tokens: FloatArray
    contexts: FloatArray
    isl_tokens: FloatArray
    held_blocks: FloatArray
    output_tokens: float

    @classmethod
    def mean(cls, windows: FloatArray, output_tokens: float) -> "Requests":
        """Return the mean requests of windows with requests."""
        with np.errstate(divide="ignore", invalid="ignore"):
            means = windows / windows[:, REQUESTS, None]
            held = windows[:, HELD_BLOCKS, None] / windows[:, HELD_REQUESTS, None]
        held = np.where(held > 0, held, np.nan)  # 0: blocks of requests are not tracked
        tokens, contexts = means[:, TOKENS, None], means[:, CONTEXTS, None]
        return cls(tokens, contexts, means[:, ISL_TOKENS, None], held, output_tokens)


def at_once(rows: FloatArray, requests: Requests, most_running: FloatArray) -> FloatArray:
    """Return how many requests each rank can run at once; infinity if nothing limits it.

    By its memory, each request with its whole output, and by `most_running`, the engine's limit,
    0 if that is not known. Windows in rows, ranks in columns.
    """
    block_size, blocks = rows[:, BLOCK_SIZE], rows[:, CAPACITY_BLOCKS]
    whole = requests.isl_tokens + requests.output_tokens
    held = requests.held_blocks * block_size + requests.output_tokens
    tokens = np.fmin(whole, held)  # of a NaN and a number, the number
    limit = np.where(most_running > 0, most_running, np.inf)
    memory = np.where(blocks > 0, blocks * block_size, np.inf)
    counts: FloatArray = np.minimum(np.maximum(memory / np.maximum(tokens, 1.0), 1.0), limit)
    return counts


def seconds_of(rows: FloatArray, requests: Requests, most_running: FloatArray) -> FloatArray:
    """Return the seconds of each rank that a mean request takes; windows in rows, ranks in columns.

    See the formula above.
    """
    output_tokens = requests.output_tokens
    resident = requests.isl_tokens + output_tokens / 2
    seconds = requests.tokens * rows[:, PREFILL_S] + requests.contexts * rows[:, CONTEXT_S]
    seconds = seconds + output_tokens * (rows[:, DECODE_S] + resident * rows[:, KV_S])
    steps = np.maximum(
        output_tokens / at_once(rows, requests, most_running),
        requests.tokens / np.maximum(rows[:, CHUNK_TOKENS], 1.0),
    )
    found: FloatArray = seconds + rows[:, BASE_S] * steps
    return np.maximum(found, 1e-9)
