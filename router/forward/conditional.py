"""When a prompt is computed where its answer is written, although others would compute it.

eff_isl = prompt − what is cached of it where it would be decoded; ratio = eff_isl / prompt

| policy | computed there |
|---|---|
| isl_bounding | little is left: eff_isl < threshold, and ratio < threshold |
| prefill_load | who would compute it is busy |
| isl_or_load | either |

In no case where it would be decoded is busy itself. Source: Dynamo 1.4, conditional disaggregation.
"""

from typing import Literal, TypeAlias

from msgspec import Struct

from router.protocol.replies import Decision, WorkerLoad

ConditionalPolicy: TypeAlias = Literal["isl_bounding", "prefill_load", "isl_or_load"]


class Conditional(Struct, frozen=True):
    """By what it is decided. Busy: above this part of what a worker takes in a step
    (`prefill_busy_threshold`), of its blocks (`decode_busy_threshold`); None: nobody is.
    """

    policy: ConditionalPolicy
    eff_isl_threshold: int = 2048
    eff_isl_ratio_threshold: float = 0.7
    prefill_busy_threshold: float | None = None
    decode_busy_threshold: float | None = None

    @property
    def looks_at_prefill(self) -> bool:
        """Whether it matters how busy those are who would compute the prompt."""
        return self.policy != "isl_bounding" and self.prefill_busy_threshold is not None

    def bypasses(self, decode: Decision, prefill: WorkerLoad | None) -> bool:
        """Whether a prompt is computed where `decode` says that it would be answered. `prefill`:
        the load of who would compute it, None where nobody knows.
        """
        is_short = self.policy != "prefill_load" and self._is_short(decode)
        is_busy = self.looks_at_prefill and prefill is not None and self._is_prefill_busy(prefill)
        return (is_short or is_busy) and not self._is_decode_busy(decode.worker_load)

    def _is_short(self, decode: Decision) -> bool:
        left_tokens = decode.isl_tokens - decode.overlap_blocks * decode.block_size
        ratio = left_tokens / max(decode.isl_tokens, 1)
        return left_tokens < self.eff_isl_threshold and ratio < self.eff_isl_ratio_threshold

    def _is_prefill_busy(self, load: WorkerLoad) -> bool:
        most, part = load.prefill_token_capacity, self.prefill_busy_threshold
        return part is not None and most > 0 and load.active_prefill_tokens > part * most

    def _is_decode_busy(self, load: WorkerLoad | None) -> bool:
        part = self.decode_busy_threshold
        if part is None or load is None or not load.total_kv_blocks:
            return False
        return load.active_decode_blocks > part * load.total_kv_blocks
