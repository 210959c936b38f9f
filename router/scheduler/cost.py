"""Cost policies, as plain arithmetic over one candidate's terms. Lower is better."""

from msgspec import Struct

from router.protocol.replies import TrustState
from router.protocol.values import Rank


class TrustWeights(Struct, frozen=True):
    """What a block of overlap counts for, by the trust in it, where a policy predicts."""

    exact: float = 1.0
    lagging: float = 1.0
    degraded: float = 0.5
    blind: float = 0.0

    def trusted_blocks(self, overlap_blocks: int, state: TrustState) -> float:
        """The overlap that a prediction counts on."""
        weights = {
            TrustState.EXACT: self.exact,
            TrustState.LAGGING: self.lagging,
            TrustState.DEGRADED: self.degraded,
            TrustState.BLIND: self.blind,
        }
        return overlap_blocks * weights[state]


class Terms(Struct, frozen=True):
    """What a candidate is judged by.

    `potential_*` count the request as if it were already there; `held_blocks` is the size of the
    rank's cache.
    """

    rank: Rank
    block_size: int
    overlap_blocks: int
    predicted_cached_blocks: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    held_blocks: int


def dynamo_1_0(terms: Terms, overlap_score_weight: float) -> float:
    """weight · prefill tokens to compute / block_size + decode blocks, in blocks.

    The weight says how many blocks of decode load one block of prefill work counts for. Source:
    Dynamo 1.0.2, `DefaultWorkerSelector`.
    """
    prefill_blocks = terms.potential_prefill_tokens / terms.block_size
    return overlap_score_weight * prefill_blocks + terms.potential_decode_blocks
