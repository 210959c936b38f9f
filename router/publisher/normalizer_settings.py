"""What a normaliser is told, and what it tells of itself."""

from typing import Literal

from msgspec import Struct


class NormalizerLimits(Struct, frozen=True):
    """Bounds on what an engine can make us keep."""

    held_back_blocks: int = 2_048
    held_back_s: float = 2.0
    contexts: int = 65_536
    known_blocks: int = 3 << 23
    """About 47 bytes each, once they are known."""


class EngineSettings(Struct, frozen=True):
    """How an engine reports.

    `report_mode` "full": clients may have it store again what it has, so that a store says "there
    is a copy", not "there is one more". `num_gpu_blocks`: of the device, if known; more copies
    prove that some were told twice. `has_lower_tiers`: None if unknown. `clears_lower_tiers`: when
    it clears the device.
    """

    report_mode: Literal["new", "full"] = "new"
    num_gpu_blocks: int | None = None
    has_lower_tiers: bool | None = None
    clears_lower_tiers: bool = False


class NormalizerCounts(Struct):
    """What happened, in totals: blocks unless the name says otherwise."""

    stored: int = 0
    stored_without_tokens: int = 0
    removed: int = 0
    cleared_events: int = 0
    held_back: int = 0
    resolved: int = 0
    given_up: int = 0
    """Held back for too long, or one too many: their names will not be known."""
    unnamed_tier: int = 0
    """Stored without tokens, and never named before."""
    unknown_removed: int = 0
    over_removed: int = 0
    """Removed from a tier in which no copy was left."""
    unknown_medium: int = 0
    ignored_groups: int = 0
    partial: int = 0
    uncounted: int = 0
    """Stored again where a store never raises a count: copies, or told anew."""
    untold_contexts: int = 0
    """Events whose LoRA and salt were one too many to be told from others."""
    refused_events: int = 0
    malformed_events: int = 0
    unknown_events: int = 0


class NormalizerStats(Struct, frozen=True):
    """Totals over all lives, and what is kept now."""

    counts: NormalizerCounts
    orphan_blocks: int
    waiting_blocks: int
    known_blocks: int
    dead_blocks: int
    device_copies: int
    contexts: int
