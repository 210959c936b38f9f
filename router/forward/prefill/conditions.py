"""Conditional disaggregation: decides when a decode worker computes the prompt itself.

eff_isl = prompt − its cached part on the decode worker; ratio = eff_isl / prompt

| policy | the decode worker computes the prompt if |
|---|---|
| isl_bounding | little is left: eff_isl < threshold, and ratio < threshold |
| prefill_load | the prefill worker is busy |
| isl_or_load | either |

In no case if the decode worker is busy itself. Source: Dynamo 1.4, conditional disaggregation.
"""

from msgspec import Struct

from router.config.openai import ConditionalPolicy, PrefillConfig
from router.protocol.replies import Decision, WorkerLoad


class DisaggregationRule(Struct, frozen=True):
    """The rule of conditional disaggregation.

    A prefill worker is busy above `prefill_busy_threshold`, a multiple of the tokens of a step; a
    decode worker above `decode_busy_threshold`, a fraction of its blocks. None means never busy.
    """

    policy: ConditionalPolicy
    eff_isl_threshold: int = 2048
    eff_isl_ratio_threshold: float = 0.7
    prefill_busy_threshold: float | None = None
    decode_busy_threshold: float | None = None

    @property
    def looks_at_prefill(self) -> bool:
        """True if the load of prefill workers matters."""
        return self.policy != "isl_bounding" and self.prefill_busy_threshold is not None

    def bypasses(self, decode: Decision, prefill: WorkerLoad | None) -> bool:
        """Return whether the worker of decision `decode` computes the prompt itself.

        `prefill`: the load of the prefill worker; None if unknown.
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


def rule_of(config: PrefillConfig) -> DisaggregationRule | None:
    """Return the rule of conditional disaggregation, or None without one."""
    if config.conditional_disagg == "off":
        return None
    return DisaggregationRule(
        config.conditional_disagg,
        config.conditional_eff_isl_threshold,
        config.conditional_eff_isl_ratio_threshold,
        config.conditional_prefill_busy_threshold,
        config.conditional_decode_busy_threshold,
    )
