"""What was measured of the tiers at start, and what is to be said about it.

A tier that gives its blocks more slowly than the engine computes them is only ever written to, and
one smaller than the tier above it keeps nothing for long: that is said, not left to be found out.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from msgspec import Struct


class TierProbe(Struct, frozen=True):
    """How fast a tier is when nothing else is done there."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    latency_s: float
    """Of a block, beside what its bytes take."""

    @classmethod
    def of(cls, size_bytes: int, blocks: int, times_s: Sequence[float]) -> "TierProbe":
        """`times_s`: before so many blocks were written, before they were read, before one was read
        again, and after it.
        """
        write_s, read_s, block_s = (max(b - a, 1e-9) for a, b in pairwise(times_s))
        latency_s = max(block_s - read_s / blocks, 0.0)
        return cls(size_bytes / write_s, size_bytes / read_s, latency_s)


class ProbedTier(Struct, frozen=True):
    """A tier, as advice looks at it. `probe`: None where it was not, or could not be, measured."""

    name: str
    num_blocks: int
    probe: TierProbe | None = None
    is_probed: bool = False


class Recompute(Struct, frozen=True):
    """How fast the engine computes blocks."""

    prefill_tokens_per_s: float
    block_size: int
    block_bytes: int

    @property
    def bytes_per_s(self) -> float:
        """What a tier has to give to be worth reading."""
        return self.prefill_tokens_per_s / self.block_size * self.block_bytes


def advice(tiers: Sequence[ProbedTier], recompute: Recompute | None = None) -> list[str]:
    """What whoever configured the tiers should know; nothing if all is well.

    `tiers`: fastest first, the device before all others. `recompute`: None as long as nothing was
    computed.
    """
    return [*_of_sizes(tiers), *_of_speeds(tiers, recompute)]


def _of_sizes(tiers: Sequence[ProbedTier]) -> Iterator[str]:
    for above, tier in pairwise(tiers):
        if tier.num_blocks < above.num_blocks:
            yield (
                f"{tier.name}: {tier.num_blocks} blocks, fewer than {above.name} has "
                f"({above.num_blocks}): what goes down pushes out what has just gone down"
            )


def _of_speeds(tiers: Sequence[ProbedTier], recompute: Recompute | None) -> Iterator[str]:
    for tier in tiers:
        if tier.is_probed and tier.probe is None:
            yield f"{tier.name}: not measured, for it is full or fails: how fast it is shows in use"
        if tier.probe is None or recompute is None:
            continue
        gives, needs = tier.probe.read_bytes_per_s, recompute.bytes_per_s
        if gives < needs:
            yield (
                f"{tier.name}: gives {gives / 1e9:.2f} GB/s, and the engine computes "
                f"{needs / 1e9:.2f} GB/s of blocks: it is written to, but not read"
            )
