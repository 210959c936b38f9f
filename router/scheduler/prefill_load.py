"""Prompts that are being computed, as far as they should be by now.

Bookings count a prompt in full until its prefill is told to be complete. With the model the terms
of a candidate are those of the moment of the decision: prompts are computed in the order in which
they were booked, each in the time its engine is predicted to take for it alone. Source: Dynamo
1.6.1, `router_prefill_load_model`, whose times come from a simulator; ours are learned.
"""

from collections.abc import Callable, Sequence

import numpy as np

from router.protocol.values import Rank
from router.scheduler.terms import FloatArray
from router.sequence.active import ActiveSequences
from router.sequence.footprint import Footprint
from router.sequence.rank_table import (
    BASE_S,
    CHUNK_TOKENS,
    CONTEXT_S,
    HEAD_CONTEXTS,
    HEAD_SINCE_S,
    HEAD_TOKENS,
    PREFILL_CONTEXTS,
    PREFILL_S,
    PREFILL_TOKENS,
)


def model_progress(
    values: FloatArray,
    ranks: Sequence[Rank],
    now_s: float,
    active: Callable[[Rank], ActiveSequences],
) -> None:
    """Take off the rows of these ranks what their engines should have computed by now. `values`:
    copies of the rank table's rows, or terms made from them. O(prompts being computed).
    """
    for index in np.flatnonzero(values[:, HEAD_TOKENS] > 0).tolist():
        row = values[index]
        elapsed_s = max(now_s - row[HEAD_SINCE_S], 0.0)
        left = active(ranks[index]).prefill_left(elapsed_s, _seconds(row))
        row[[PREFILL_TOKENS, PREFILL_CONTEXTS, HEAD_TOKENS, HEAD_CONTEXTS]] = left
        row[HEAD_SINCE_S] = now_s


def _seconds(row: FloatArray) -> Callable[[Footprint], float]:
    base_s, prefill_s, context_s = row[BASE_S], row[PREFILL_S], row[CONTEXT_S]
    chunk_tokens = max(row[CHUNK_TOKENS], 1.0)

    def seconds(prompt: Footprint) -> float:
        tokens = prompt.prefill_tokens
        steps = max(tokens / chunk_tokens, 1.0)
        work_s = tokens * prefill_s + prompt.prefill_contexts * context_s
        return float(work_s + steps * base_s)

    return seconds
