"""A slow model of every policy: costs and draws by the formulas in the scheduler's README."""

import math
from bisect import bisect_right
from itertools import pairwise

from router.scheduler.terms import (
    NEW_BLOCKS,
    OVERLAP_DEVICE,
    OVERLAP_DISK,
    OVERLAP_HOST,
    OVERLAP_REMOTE,
    TAINT_FACTOR,
)
from router.sequence import rank_table as columns
from support.values.terms import predicted_costs


def costs_of(policy, rows, settings, isl_tokens, expected, now_s):
    """Return each candidate's cost; for `round-robin`, which has none, equal ones."""
    if policy == "predictive":
        tiers = (settings.host_cache_hit_weight, settings.disk_cache_hit_weight)
        weights = (settings.delay_weight, *tiers, settings.shared_cache_multiplier)
        return predicted_costs(rows, isl_tokens, expected, now_s, weights)
    if policy == "cache-aware":
        costs = cache_aware(rows, isl_tokens)
    else:
        costs = [COSTS[policy](row, rows, settings, isl_tokens) for row in rows]
    return [cost * row[TAINT_FACTOR] for cost, row in zip(costs, rows, strict=True)]


def uncached(row, isl_tokens):
    return max(isl_tokens - row[OVERLAP_DEVICE] * row[columns.BLOCK_SIZE], 0)


def requests(row):
    return row[columns.REQUESTS] + row[columns.FOREIGN_REQUESTS]


def decode_blocks(row, unknown):
    blocks = row[columns.DECODE_BLOCKS] + row[NEW_BLOCKS]
    return unknown if math.isnan(blocks) else blocks


def dynamo_1_0(row, _rows, settings, isl_tokens):
    prefill = (row[columns.PREFILL_TOKENS] + uncached(row, isl_tokens)) / row[columns.BLOCK_SIZE]
    return settings.prefill_load_scale * prefill + decode_blocks(row, math.floor(prefill))


def dynamo_1_6(row, rows, settings, isl_tokens):
    raw, decay, block_size = 0.0, 1.0, row[columns.BLOCK_SIZE]
    if settings.track_prefill_tokens:
        raw = (row[columns.PREFILL_TOKENS] + isl_tokens) / block_size
        lowest = min(each[columns.PREFILL_TOKENS] for each in rows)
        excess = (row[columns.PREFILL_TOKENS] - lowest) / block_size
        blocks = max(math.ceil(isl_tokens / block_size), 1)
        decay = 1 / (1 + settings.overlap_score_credit_decay * excess / blocks)
    tiers = [row[each] for each in (OVERLAP_DEVICE, OVERLAP_HOST, OVERLAP_DISK, OVERLAP_REMOTE)]
    more = [behind - before for before, behind in pairwise(tiers)]
    saved = settings.overlap_score_credit * decay * tiers[0]
    saved += settings.host_cache_hit_weight * more[0] + settings.disk_cache_hit_weight * more[1]
    saved += settings.shared_cache_multiplier * more[2]
    decode = decode_blocks(row, 0.0)
    only_decodes = row[columns.DECODE_SIDE] and not settings.track_prefill_tokens
    if only_decodes and settings.overlap_score_credit > 0:
        prefill, decode = 0.0, max(decode - saved, 0.0)
    else:
        prefill = settings.prefill_load_scale * max(raw - saved, 0.0)
    return prefill + decode + settings.decode_active_request_weight * row[columns.REQUESTS]


def lmetric(row, _rows, _settings, isl_tokens):
    tokens = row[columns.PREFILL_TOKENS] + row[columns.FOREIGN_TOKENS] + uncached(row, isl_tokens)
    return tokens * (requests(row) + 1)


COSTS = {
    "dynamo-1.0": dynamo_1_0,
    "dynamo-1.6": dynamo_1_6,
    "lmetric": lmetric,
    "least-loaded": lambda row, *_: requests(row),
    "power-of-two": lambda row, *_: requests(row),
    "random": lambda *_: 0.0,
    "round-robin": lambda *_: 0.0,
}

POLICIES = (*COSTS, "cache-aware", "predictive")


def follows_cache(rows, isl_tokens):
    """Return whether `cache-aware` follows the caches: load is even, and the best match good."""
    loads = [requests(row) for row in rows]
    is_uneven = max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads)
    best = max(isl_tokens - uncached(row, isl_tokens) for row in rows) / max(isl_tokens, 1)
    return best > 0.3 and not is_uneven


def cache_aware(rows, isl_tokens):
    if follows_cache(rows, isl_tokens):
        return [uncached(row, isl_tokens) / max(isl_tokens, 1) for row in rows]
    return [requests(row) for row in rows]


def tie_breakers(policy, rows, isl_tokens):
    """Return the keys that decide between equal costs, a tuple for each candidate."""
    if policy == "dynamo-1.0":
        return [(row[columns.HELD_BLOCKS],) for row in rows]
    if policy == "cache-aware":
        if not follows_cache(rows, isl_tokens):
            return [(row[columns.HELD_BLOCKS],) for row in rows]
        return [(requests(row) * 1.0, row[columns.HELD_BLOCKS]) for row in rows]
    return [()] * len(rows)


def picked(costs, keys, temperature, dice):
    """Return the index of the chosen cost: the cheapest, or a draw by the temperature."""
    if temperature > 0:
        spread = max(costs) - min(costs) or 1.0
        total, sums = 0.0, []
        for cost in costs:
            total += math.exp(-(cost - min(costs)) / spread / temperature)
            sums.append(total)
        return bisect_right(sums, dice.random() * total)
    ordered = [(cost, *key) for cost, key in zip(costs, keys, strict=True)]
    ties = [index for index, each in enumerate(ordered) if each == min(ordered)]
    return ties[dice.randrange(len(ties))] if len(ties) > 1 else ties[0]


def of_two(costs, temperature, dice):
    """Return the index that `power-of-two` chooses."""
    first = dice.randrange(len(costs))
    if len(costs) == 1:
        return first
    second = dice.randrange(len(costs) - 1)
    pair = [first, second + (second >= first)]
    return pair[picked([costs[each] for each in pair], [(), ()], temperature, dice)]
