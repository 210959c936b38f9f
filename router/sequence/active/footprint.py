"""The load of a prompt as a booking counts it, and the usage expected of its engine."""

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from router.protocol.replicas import Progress, SharedReservation
from router.protocol.requests import ConfigOverride
from router.protocol.values import HashArray, Phase, Rank, Scope, pack_hashes

MAX_SHARED_BLOCKS = 1 << 16
"""The limit of a prompt's blocks that are published to other routers.

The blocks beyond it count as blocks that cannot be shared.
"""


class ExpectedUsage(Struct, frozen=True, eq=False, gc=False):
    """The owner of a prompt, and what was known of it when it was booked.

    `found_by`: the hashes of its blocks in caches; `overlap_blocks`: leading blocks that its rank
    held, in any tier; `is_salted`: the request has a salt or a LoRA; `is_named_by_caller`: the
    caller computed the hashes; `has_objects`: the prompt has multimodal objects, for which engines
    count more tokens.
    """

    scope: Scope
    tenant: str | None
    found_by: HashArray
    overlap_blocks: int
    is_salted: bool = False
    is_named_by_caller: bool = False
    has_objects: bool = False


def reusable_blocks(isl_tokens: int, block_size: int, overlap_blocks: int, *, eagle: bool) -> int:
    """Return the cached blocks that an engine reuses.

    An engine computes at least one token, with EAGLE one block more.

    Source: vLLM `max_cache_hit_length = num_tokens − 1`, `drop_eagle_block`.
    """
    reusable = min(overlap_blocks, max(isl_tokens - 1, 0) // block_size)
    return max(reusable - eagle, 0)


class Footprint(Struct, frozen=True, eq=False, gc=False):
    """The load of a prompt, as a booking counts it.

    `sequence_hashes`: blocks that requests can share; `own_blocks`: blocks that cannot be shared,
    such as an incomplete last block. `cached_tokens` need not be computed; they are all tokens if
    the prompt `is_prefilled_elsewhere`. `expected_output_tokens`: the output length, if the caller
    gives one. `expectation`: compared with the usage that the engine reports; None if another
    router booked the request.
    """

    sequence_hashes: HashArray
    own_blocks: int
    isl_tokens: int
    cached_tokens: int
    block_size: int
    expected_output_tokens: int | None = None
    is_prefilled_elsewhere: bool = False
    expectation: ExpectedUsage | None = None

    @property
    def prefill_tokens(self) -> int:
        """Tokens left to compute."""
        return max(self.isl_tokens - self.cached_tokens, 0)

    def reusable_tokens(self, overlap_blocks: int, *, eagle: bool = False) -> int:
        """Return the tokens that the engine reuses of `overlap_blocks` cached blocks."""
        return self.block_size * reusable_blocks(
            self.isl_tokens, self.block_size, overlap_blocks, eagle=eagle
        )

    @property
    def prefill_work(self) -> tuple[int, float]:
        """The n tokens left to compute, and their attention work: n · (cached + n / 2)."""
        tokens = max(self.isl_tokens - self.cached_tokens, 0)
        return tokens, tokens * (self.cached_tokens + tokens / 2)

    def shared(self, request_id: str, rank: Rank, progress: Progress) -> SharedReservation:
        """Return its reservation as published to other routers."""
        hashes = self.sequence_hashes[:MAX_SHARED_BLOCKS]
        return SharedReservation(
            request_id,
            rank,
            pack_hashes(hashes),
            self.own_blocks + len(self.sequence_hashes) - len(hashes),
            self.isl_tokens,
            self.cached_tokens,
            self.block_size,
            progress,
        )


class TrackedParts(Struct, frozen=True, kw_only=True):
    """The parts of a request that count as load on the rank it is booked on.

    `active_blocks`: its blocks; `output_blocks`: the blocks it grows by; `prefill_tokens`: the
    tokens left to compute; `kv_reuse`: requests share the blocks of their common prefix.
    """

    active_blocks: bool = True
    output_blocks: bool = True
    prefill_tokens: bool = True
    kv_reuse: bool = True

    def of_phase(self, phase: Phase | None) -> "TrackedParts":
        """Return the tracking of one phase of a disaggregated request.

        A prefill worker keeps no blocks of the request, and a decode worker has no prompt to
        compute.
        """
        if phase == "prefill":
            return replace(self, active_blocks=False)
        return replace(self, prefill_tokens=False) if phase == "decode" else self

    def overridden(self, override: ConfigOverride | None) -> "TrackedParts":
        """Return the tracking with a request's overrides."""
        if override is None:
            return self
        given = {
            "kv_reuse": override.assume_kv_reuse,
            "prefill_tokens": override.track_prefill_tokens,
        }
        return replace(self, **{name: each for name, each in given.items() if each is not None})

    @property
    def counts_output(self) -> bool:
        """True if output blocks count as load."""
        return self.active_blocks and self.output_blocks

    def counted(self, footprint: Footprint) -> Footprint:
        """Return the counted part of a footprint."""
        if self.active_blocks and self.prefill_tokens and self.kv_reuse:
            return footprint
        changes: dict[str, Any] = {}
        if not (self.active_blocks and self.kv_reuse):
            blocks = len(footprint.sequence_hashes) + footprint.own_blocks
            changes["sequence_hashes"] = footprint.sequence_hashes[:0]
            changes["own_blocks"] = blocks if self.active_blocks else 0
        if not self.prefill_tokens:
            changes["cached_tokens"] = footprint.isl_tokens
            changes["is_prefilled_elsewhere"] = True
        return replace(footprint, **changes)


COUNT_ALL = TrackedParts()
"""All parts of a request count."""
