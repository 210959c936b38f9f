"""The expected progress of prompts that are being computed.

Bookings count a prompt in full until its prefill is reported complete. With the model, the terms of
a candidate are those at the time of the decision: prompts are computed in the order of booking,
each in the time its engine is predicted to take for it alone. Source: Dynamo 1.6.1,
`router_prefill_load_model`, with times from a simulator; ours are learned.

If callers do not report when prompts are complete, the prompts that should be leave the queue by
the same times (`end_overdue`).
"""

from collections.abc import Callable, Sequence

import numpy as np

from router.protocol.values import Rank
from router.scheduler.terms import FloatArray
from router.sequence.active.active_sequences import ActiveSequences
from router.sequence.active.footprint import Footprint
from router.sequence.active.tracker import Tracker
from router.sequence.rank_table import (
    BASE_S,
    CHUNK_TOKENS,
    CONTEXT_S,
    DECODE_S,
    DECODING_KV_TOKENS,
    DECODING_REQUESTS,
    HEAD_CONTEXTS,
    HEAD_SINCE_S,
    HEAD_TOKENS,
    KV_S,
    PREFILL_S,
    PREFILL_TOKENS,
    QUEUED_CONTEXTS,
    QUEUED_TOKENS,
    REQUESTS,
    RankTable,
)


def model_progress(
    values: FloatArray,
    ranks: Sequence[Rank],
    now_s: float,
    active: Callable[[Rank], ActiveSequences],
) -> None:
    """Subtract from these rows what the ranks' engines should have computed by now.

    `values`: copies of the rank table's rows, or terms made from them. O(prompts being computed).
    """
    for index in np.flatnonzero(values[:, HEAD_TOKENS] > 0).tolist():
        row = values[index]
        left = active(ranks[index]).prefill_left(now_s, _seconds(row))
        row[[QUEUED_TOKENS, QUEUED_CONTEXTS, HEAD_TOKENS, HEAD_CONTEXTS]] = left
        row[PREFILL_TOKENS] = row[QUEUED_TOKENS]
        row[HEAD_SINCE_S] = now_s


def end_overdue(table: RankTable, tracker: Tracker, now_s: float) -> None:
    """Mark all prompts as complete that should be by now. O(ranks + those prompts)."""
    values = table.values
    least_s = values[:, HEAD_TOKENS] * values[:, PREFILL_S] + values[:, BASE_S]
    due = values[:, HEAD_SINCE_S] + least_s <= now_s
    due &= values[:, REQUESTS] > values[:, DECODING_REQUESTS]
    for rank in list(tracker.ranks) if due.any() else ():
        if due[table.slot(rank)]:
            tracker.end_overdue(rank, now_s, _seconds(table.row(rank)))


def _seconds(row: FloatArray) -> Callable[[Footprint], float]:
    """Return a function of the time of a prompt on this rank, with its present decode load."""
    values = row.tolist()
    prefill_s, context_s, decoding = values[PREFILL_S], values[CONTEXT_S], values[DECODING_REQUESTS]
    step_s = values[BASE_S] + decoding * values[DECODE_S]
    step_s += values[DECODING_KV_TOKENS] * values[KV_S]
    chunk_tokens = max(values[CHUNK_TOKENS] - decoding, 1.0)

    def seconds(prompt: Footprint) -> float:
        tokens, contexts = prompt.prefill_work
        steps = max(tokens / chunk_tokens, 1.0)
        return float(tokens * prefill_s + contexts * context_s + steps * step_s)

    return seconds
