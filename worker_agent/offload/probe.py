"""Measurements of the tiers at start, and the resulting advice.

A tier that is read more slowly than the engine computes blocks is only ever written to, and a tier
smaller than the one above it keeps nothing for long. Both are reported at start.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from msgspec import Struct


class TierProbe(Struct, frozen=True):
    """The speed of a tier without other load."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    latency_s: float
    """The latency of a block, besides the time for its bytes."""

    @classmethod
    def of(cls, size_bytes: int, blocks: int, times_s: Sequence[float]) -> "TierProbe":
        """Compute the speeds from four times.

        `times_s`: before `blocks` blocks were written, before they were read, before one was read
        again, and after it.
        """
        write_s, read_s, block_s = (max(b - a, 1e-9) for a, b in pairwise(times_s))
        latency_s = max(block_s - read_s / blocks, 0.0)
        return cls(size_bytes / write_s, size_bytes / read_s, latency_s)


class ProbedTier(Struct, frozen=True):
    """A tier, as `advice` considers it. `probe`: None if it was not measured.

    `is_probed`: a measurement was tried.
    """

    name: str
    num_blocks: int
    probe: TierProbe | None = None
    is_probed: bool = False


class Recompute(Struct, frozen=True):
    """The speed at which the engine computes blocks."""

    prefill_tokens_per_s: float
    block_size: int
    block_bytes: int

    @property
    def bytes_per_s(self) -> float:
        """The least read speed of a tier that is worth reading."""
        return self.prefill_tokens_per_s / self.block_size * self.block_bytes


def advice(tiers: Sequence[ProbedTier], recompute: Recompute | None = None) -> list[str]:
    """Return advice on the configuration of the tiers; empty if all is well.

    `tiers`: fastest first, the device before all others. `recompute`: None until prompts were
    computed.
    """
    return [*_of_sizes(tiers), *_of_speeds(tiers, recompute)]


def _of_sizes(tiers: Sequence[ProbedTier]) -> Iterator[str]:
    for above, tier in pairwise(tiers):
        if tier.num_blocks < above.num_blocks:
            yield (
                f"{tier.name}: {tier.num_blocks} blocks, fewer than {above.name} has "
                f"({above.num_blocks}): each offloaded block evicts a recently offloaded one"
            )


def _of_speeds(tiers: Sequence[ProbedTier], recompute: Recompute | None) -> Iterator[str]:
    for tier in tiers:
        if tier.is_probed and tier.probe is None:
            yield f"{tier.name}: not measured, because it is full or fails; its speed shows in use"
        if tier.probe is None or recompute is None:
            continue
        gives, needs = tier.probe.read_bytes_per_s, recompute.bytes_per_s
        if gives < needs:
            yield (
                f"{tier.name}: reads {gives / 1e9:.2f} GB/s, and the engine computes "
                f"{needs / 1e9:.2f} GB/s of blocks: it is written to, but not read"
            )
