"""What a request weighs on the rank it is booked on."""

from msgspec import Struct

from router.protocol.values import HashArray


class Footprint(Struct, frozen=True, eq=False):
    """A prompt as a booking counts it.

    `sequence_hashes` are blocks that requests can share, `own_blocks` such as nobody can: an
    incomplete last block, say. `cached_tokens` need not be computed.
    """

    sequence_hashes: HashArray
    own_blocks: int
    isl_tokens: int
    cached_tokens: int
    block_size: int

    @property
    def prefill_tokens(self) -> int:
        """Tokens left to compute."""
        return max(self.isl_tokens - self.cached_tokens, 0)

    @property
    def prefill_contexts(self) -> float:
        """n · (cached + n / 2) for n tokens left to compute: how much attention they take."""
        return self.prefill_tokens * (self.cached_tokens + self.prefill_tokens / 2)
