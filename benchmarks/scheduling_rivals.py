"""Policies of other routers that the router does not ship, as rivals."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from router.scheduler.policy._predicted_parts import PREFILL_OWN_S, QUEUE_S, TPOT_S
from router.scheduler.policy.cache_aware import CacheAware
from router.scheduler.policy.predictive import predicted_parts
from router.scheduler.selector import Policy, Selector
from router.scheduler.settings import PolicySettings
from router.scheduler.terms import CACHED_BLOCKS, FloatArray, TermTable
from router.sequence.rank_table import BLOCK_SIZE, DECODING_KV_TOKENS, PREFILL_TOKENS


class LlmD(Policy):
    """llm-d's prefix-cache-affinity filter with its token-load scorer.

    Ranks with at least the fraction `affinity` of the prompt are sticky. Of these, or of all if the
    least loaded sticky one has `penalty_tokens` more in flight than the least loaded other, the
    rank with the fewest tokens in flight. There, the penalty is 18 s at a measured throughput of
    15,928 tokens a second; in flight are tokens to compute, and the contexts of decoding requests.
    """

    __slots__ = ("_affinity", "_penalty_tokens")
    name = "llm-d"

    def __init__(self, affinity: float = 0.8, penalty_tokens: float = 286_704.0) -> None:
        self._affinity = affinity
        self._penalty_tokens = penalty_tokens

    def score(self, table: TermTable, settings: PolicySettings) -> FloatArray:  # noqa: ARG002
        """Return the tokens in flight, far too many for ranks that are filtered out."""
        tokens = table.column(PREFILL_TOKENS) + table.column(DECODING_KV_TOKENS)
        cached = table.column(CACHED_BLOCKS) * table.column(BLOCK_SIZE)
        is_sticky = cached >= self._affinity * table.isl_tokens
        if is_sticky.all() or not is_sticky.any():
            return tokens
        if tokens[is_sticky].min() - tokens[~is_sticky].min() > self._penalty_tokens:
            return tokens
        return np.where(is_sticky, tokens, tokens + 1e12)


class LlmDSlo(Policy):
    """llm-d's headroom tiers with its latency scorer, by this router's predictions.

    Headroom is the objective less the prediction, 0.8 of it of the first token and 0.2 of the time
    per output token, each as a fraction of its objective. Ranks with positive headroom of both go
    before all others. Of them it takes the most headroom, or if it `packs`, the least; of the
    others the least missing. Its one in a hundred that explores the lower tier is left out.
    """

    __slots__ = ("_packs",)
    name = "llm-d-slo"

    def __init__(self, packs: float = 0.0) -> None:
        self._packs = bool(packs)

    def score(self, table: TermTable, settings: PolicySettings) -> FloatArray:
        """Return the headroom as a cost, far more for the lower tier."""
        predicted_s = predicted_parts(table, settings)
        first_s = predicted_s[:, QUEUE_S : PREFILL_OWN_S + 1].sum(axis=1)
        first = 1 - first_s / table.most_ttft_s
        later = 1 - predicted_s[:, TPOT_S] / table.most_tpot_s
        headroom = 0.8 * first + 0.2 * later
        is_met = (first > 0) & (later > 0)
        packed = headroom if self._packs else -headroom
        return np.where(is_met, packed, 1e6 - headroom)


WITH_SETTINGS: Mapping[str, Callable[..., Selector]] = MappingProxyType(
    {CacheAware.name: CacheAware, LlmD.name: LlmD, LlmDSlo.name: LlmDSlo}
)
"""Policies with settings of their own, which are none of the router."""
