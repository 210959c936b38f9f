"""Policies of other routers that the router does not ship, as rivals."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from router.scheduler.policy.cache_aware import CacheAware
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


WITH_SETTINGS: Mapping[str, Callable[..., Selector]] = MappingProxyType(
    {CacheAware.name: CacheAware, LlmD.name: LlmD}
)
"""Policies with settings of their own, which are none of the router."""
