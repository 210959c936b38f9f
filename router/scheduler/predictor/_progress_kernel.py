"""Expected growth of requests since their callers' last progress reports."""

import numpy as np
import numpy.typing as npt

from router.runtime.kernels.numba_runtime import kernel
from router.sequence.rank_table import (
    BASE_S,
    BLOCK_SIZE,
    DECODE_BLOCKS,
    DECODE_S,
    DECODING_KV_TOKENS,
    DECODING_REQUESTS,
    FOREIGN_REQUESTS,
    GROWING_REQUESTS,
    GROWING_SINCE_S,
    KV_S,
    OUTPUT_TOKENS,
    PREFILL_SHARE,
)


@kernel("void(float64[:, ::1], float64, boolean)")
def grow(values: npt.NDArray[np.float64], now_s: float, counts_output: bool) -> None:
    """Add to every row the output that its engine should have generated without a report.

    Counts one token per step for each request, in the steps that the engine is predicted to make
    beside its prompts, up to the usual output length of that rank.
    """
    for i in range(len(values)):
        row = values[i]
        requests = row[GROWING_REQUESTS]
        if requests <= 0:
            continue
        decoding = max(row[DECODING_REQUESTS] + row[FOREIGN_REQUESTS], 0.0)
        step_s = row[BASE_S] + decoding * row[DECODE_S] + row[DECODING_KV_TOKENS] * row[KV_S]
        if step_s <= 0:
            continue
        elapsed_s = max(requests * now_s - row[GROWING_SINCE_S], 0.0)
        tokens = elapsed_s * (1.0 - row[PREFILL_SHARE]) / step_s
        if row[OUTPUT_TOKENS] > 0:
            tokens = min(tokens, requests * row[OUTPUT_TOKENS])
        row[DECODING_KV_TOKENS] += tokens
        if counts_output:
            row[DECODE_BLOCKS] += tokens / row[BLOCK_SIZE]
