"""Conditional disaggregation: decides when a decode worker computes the prompt itself.

eff_isl = prompt − its cached part on the decode worker; ratio = eff_isl / prompt

| policy | the decode worker computes the prompt if |
|---|---|
| isl_bounding | little is left: eff_isl < threshold, and ratio < threshold |
| prefill_load | the prefill worker is busy |
| isl_or_load | either |

In no case if the decode worker is busy itself. Source: Dynamo 1.4, conditional disaggregation.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from router.errors import ConfigError
from router.protocol.replies import Decision, WorkerLoad
from router.runtime.process.settings import about

ConditionalPolicy: TypeAlias = Literal["isl_bounding", "prefill_load", "isl_or_load"]


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


class PrefillConfig(Struct, frozen=True, kw_only=True):
    """Disaggregated serving."""

    disaggregation: Annotated[
        Literal["auto", "off"],
        about("auto: workers of role prefill compute prompts as soon as there are any"),
    ] = "auto"
    prefill_fallback: Annotated[
        Literal["always", "unregistered"],
        about(
            "whether the decode worker computes the prompt as well: always, if "
            "prefill fails; or only if there is no worker of role prefill"
        ),
    ] = "always"
    prefill_timeout_s: Annotated[
        float,
        about(
            "time for a prefill worker to compute a prompt; after that the next one is tried", gt=0
        ),
    ] = 120.0
    conditional_disagg: Annotated[
        ConditionalPolicy | Literal["off"],
        about("rule by which the decode worker computes prompts itself; off: none"),
    ] = "off"
    conditional_eff_isl_threshold: Annotated[
        int, about("isl_bounding, isl_or_load: limit of the uncached tokens", ge=0)
    ] = 2048
    conditional_eff_isl_ratio_threshold: Annotated[
        float, about("isl_bounding, isl_or_load: limit of their part of a prompt", ge=0)
    ] = 0.7
    conditional_prefill_busy_threshold: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        about(
            "prefill_load, isl_or_load: prefill worker is busy with more tokens to compute "
            "than this multiple of a step's"
        ),
    ] = None
    conditional_decode_busy_threshold: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        about("limit of a decode worker's block usage; above it, it computes none"),
    ] = None

    @property
    def conditional(self) -> DisaggregationRule | None:
        """The rule of conditional disaggregation, or None without one."""
        if self.conditional_disagg == "off":
            return None
        return DisaggregationRule(
            self.conditional_disagg,
            self.conditional_eff_isl_threshold,
            self.conditional_eff_isl_ratio_threshold,
            self.conditional_prefill_busy_threshold,
            self.conditional_decode_busy_threshold,
        )


def check_prefill(config: PrefillConfig) -> None:
    """Check settings for contradictions. Raises ConfigError."""
    policy = config.conditional_disagg
    if policy != "off" and config.disaggregation == "off":
        allowed = "off, or disaggregation=auto"
        raise ConfigError("conditional_disagg", f"{policy}, without disaggregation", allowed)
    key, needs_load = "conditional_prefill_busy_threshold", policy not in ("off", "isl_bounding")
    if needs_load and config.conditional_prefill_busy_threshold is None:
        raise ConfigError(key, f"missing, with {policy}", "a part of a step's tokens, such as 2")
