"""What is counted of bookings: all of it, unless somebody else's work is not to be counted here."""

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from router.protocol.requests import ConfigOverride
from router.protocol.values import Phase
from router.sequence.footprint import Footprint


class Tracking(Struct, frozen=True, kw_only=True):
    """What of a request is counted on the rank it is booked on.

    `active_blocks`: its blocks; `output_blocks`: those it grows by; `prefill_tokens`: what is left
    to compute; `kv_reuse`: requests share the blocks of their common prefix.
    """

    active_blocks: bool = True
    output_blocks: bool = True
    prefill_tokens: bool = True
    kv_reuse: bool = True

    def of_phase(self, phase: Phase | None) -> "Tracking":
        """The same of one part of a request: who computes a prompt for another keeps nothing of it,
        and who goes on from there has nothing to compute.
        """
        if phase == "prefill":
            return replace(self, active_blocks=False)
        return replace(self, prefill_tokens=False) if phase == "decode" else self

    def overridden(self, override: ConfigOverride | None) -> "Tracking":
        """The same, as far as a request does not want it otherwise."""
        if override is None:
            return self
        given = {
            "kv_reuse": override.assume_kv_reuse,
            "prefill_tokens": override.track_prefill_tokens,
        }
        return replace(self, **{name: each for name, each in given.items() if each is not None})

    @property
    def counts_output(self) -> bool:
        """Whether an output block is a block."""
        return self.active_blocks and self.output_blocks

    def counted(self, footprint: Footprint) -> Footprint:
        """What is counted of a request that weighs this."""
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
