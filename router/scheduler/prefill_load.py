"""Prompts that are being computed, as far as they should be by now.

Bookings count a prompt in full until its prefill is told to be complete. With the model the terms
of a candidate are those of the moment of the decision: prompts are computed in the order in which
they were booked, each in the time its engine is predicted to take for it alone. Source: Dynamo
1.6.1, `router_prefill_load_model`, whose times come from a simulator; ours are learned.

Where callers do not say when prompts are complete, those that should be leave the queue by the same
times (`end_overdue`).
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
from router.sequence.tracker import Tracker


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
        left = active(ranks[index]).prefill_left(now_s, _seconds(row))
        row[[QUEUED_TOKENS, QUEUED_CONTEXTS, HEAD_TOKENS, HEAD_CONTEXTS]] = left
        row[PREFILL_TOKENS] = row[QUEUED_TOKENS]
        row[HEAD_SINCE_S] = now_s


def end_overdue(table: RankTable, tracker: Tracker, now_s: float) -> None:
    """Take all prompts for complete that should be by now. O(ranks + those)."""
    values = table.values
    least_s = values[:, HEAD_TOKENS] * values[:, PREFILL_S] + values[:, BASE_S]
    due = values[:, HEAD_SINCE_S] + least_s <= now_s
    due &= values[:, REQUESTS] > values[:, DECODING_REQUESTS]
    for rank in list(tracker.ranks) if due.any() else ():
        if due[table.slot(rank)]:
            tracker.end_overdue(rank, now_s, _seconds(table.row(rank)))


def _seconds(row: FloatArray) -> Callable[[Footprint], float]:
    """What a prompt takes beside those that decode there: in steps that compute theirs too."""
    values = row.tolist()
    prefill_s, context_s, decoding = values[PREFILL_S], values[CONTEXT_S], values[DECODING_REQUESTS]
    step_s = values[BASE_S] + decoding * values[DECODE_S]
    step_s += values[DECODING_KV_TOKENS] * values[KV_S]
    chunk_tokens = max(values[CHUNK_TOKENS] - decoding, 1.0)

    def seconds(prompt: Footprint) -> float:
        tokens = prompt.prefill_tokens
        steps = max(tokens / chunk_tokens, 1.0)
        return float(tokens * prefill_s + prompt.prefill_contexts * context_s + steps * step_s)

    return seconds
