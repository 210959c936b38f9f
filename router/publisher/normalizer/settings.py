"""The settings, limits and counters of a normaliser."""

from typing import Literal

from msgspec import Struct

from router.protocol.hybrid import NO_SETTINGS, HybridSettings


class NormalizerLimits(Struct, frozen=True):
    """Limits of the memory that an engine's events can occupy."""

    held_back_blocks: int = 2_048
    held_back_s: float = 2.0
    doubt_after_s: float = 0.0
    """Orphans are a doubt once there have been any for this time, or one is dropped."""

    contexts: int = 65_536
    known_blocks: int = 3 << 23
    """The limit of known blocks; each takes about 47 bytes."""


class EngineSettings(Struct, frozen=True):
    """The way an engine reports its blocks.

    `report_mode` "full": clients may make the engine publish held blocks again, so a store means
    "there is a copy", not "there is one more". "deduplicated": the publisher counts copies itself
    and publishes the last removal only; a store means the same. `num_gpu_blocks`: the size of the
    device pool, None if unknown; more copies prove that some were counted twice.
    `has_lower_tiers`: None if unknown. `clears_lower_tiers`: True if clearing the device clears
    lower tiers too. `hybrid`: of a hybrid model, what no event contains. `has_full_only`: the
    model is hybrid, and no event says what its windows and states hold, as with SGLang.
    """

    report_mode: Literal["new", "full", "deduplicated"] = "new"
    num_gpu_blocks: int | None = None
    has_lower_tiers: bool | None = None
    clears_lower_tiers: bool = False
    hybrid: HybridSettings = NO_SETTINGS
    has_full_only: bool = False


class NormalizerCounts(Struct):
    """Totals by outcome: of blocks, unless the name or docstring says events."""

    stored: int = 0
    stored_without_tokens: int = 0
    removed: int = 0
    cleared_events: int = 0
    held_back: int = 0
    resolved: int = 0
    given_up: int = 0
    """Held back for too long, or beyond the limit: these blocks remain unnamed."""
    unnamed_tier: int = 0
    """Stored without tokens, and never named before."""
    unknown_removed: int = 0
    over_removed: int = 0
    """Removed from a tier in which no copy was left."""
    unknown_medium: int = 0
    class_blocks: int = 0
    """Stored and removed, of groups other than full attention."""
    partial: int = 0
    uncounted: int = 0
    """Stored again in a mode in which a store never raises a count: copies, or repeated reports."""
    untold_contexts: int = 0
    """Events with a LoRA and salt beyond the limit on contexts."""
    refused_events: int = 0
    malformed_events: int = 0
    unknown_events: int = 0


class NormalizerStats(Struct, frozen=True):
    """Totals over all lives, and current sizes."""

    counts: NormalizerCounts
    orphan_blocks: int
    waiting_blocks: int
    known_blocks: int
    dead_blocks: int
    device_copies: int
    contexts: int
