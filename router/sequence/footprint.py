"""What a request weighs on the rank it is booked on."""

from msgspec import Struct

from router.protocol.values import HashArray
from router.sequence.expectation import Expectation


def reusable_blocks(isl_tokens: int, block_size: int, overlap_blocks: int, *, eagle: bool) -> int:
    """Blocks that an engine will reuse: it computes at least one token, with EAGLE one block more.

    Source: vLLM `max_cache_hit_length = num_tokens − 1`, `drop_eagle_block`.
    """
    reusable = min(overlap_blocks, max(isl_tokens - 1, 0) // block_size)
    return max(reusable - eagle, 0)


class Footprint(Struct, frozen=True, eq=False):
    """A prompt as a booking counts it.

    `sequence_hashes` are blocks that requests can share, `own_blocks` such as nobody can: an
    incomplete last block, say. `cached_tokens` need not be computed: all of them, where the prompt
    `is_prefilled_elsewhere`. `expected_output_tokens`: how long the answer will be, where its
    caller says so. `expectation`: with what its engine's usage is compared; None: it was booked by
    another router.
    """

    sequence_hashes: HashArray
    own_blocks: int
    isl_tokens: int
    cached_tokens: int
    block_size: int
    expected_output_tokens: int | None = None
    is_prefilled_elsewhere: bool = False
    expectation: Expectation | None = None

    @property
    def prefill_tokens(self) -> int:
        """Tokens left to compute."""
        return max(self.isl_tokens - self.cached_tokens, 0)

    def reusable_tokens(self, overlap_blocks: int, *, eagle: bool = False) -> int:
        """What its engine will reuse of so many cached blocks."""
        return self.block_size * reusable_blocks(
            self.isl_tokens, self.block_size, overlap_blocks, eagle=eagle
        )

    @property
    def prefill_contexts(self) -> float:
        """n · (cached + n / 2) for n tokens left to compute: how much attention they take."""
        tokens = self.prefill_tokens
        return tokens * (self.cached_tokens + tokens / 2)
