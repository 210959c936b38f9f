"""What of a process that forwards concerns prompts that others compute."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from router.errors import ConfigError
from router.forward.conditional import Conditional, ConditionalPolicy
from router.process.process_config import ProcessConfig

FallsBack: TypeAlias = Literal["always", "unregistered"]


class PrefillSettings(Struct, frozen=True):
    """`is_on`: look for workers of role prefill. `timeout_s`: for a prompt; beyond, the next."""

    is_on: bool
    falls_back: FallsBack
    max_attempts: int
    timeout_s: float
    answer_limit_bytes: int
    conditional: Conditional | None = None
    authorization: bytes | None = None


class PrefillConfig(ProcessConfig, frozen=True, kw_only=True):
    """Disaggregated serving."""

    disaggregation: Annotated[
        Literal["auto", "off"],
        Meta(description="auto: workers of role prefill compute prompts as soon as there are any"),
    ] = "auto"
    prefill_fallback: Annotated[
        FallsBack,
        Meta(
            description=(
                "whether the decode worker computes the prompt as well: always, if "
                "prefill fails; or only if there is no worker of role prefill"
            )
        ),
    ] = "always"
    prefill_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description=(
                "time for a prefill worker to compute a prompt; after that the next one is tried"
            ),
        ),
    ] = 120.0
    conditional_disagg: Annotated[
        ConditionalPolicy | Literal["off"],
        Meta(description="when to compute a prompt where it is answered: if little is left, …"),
    ] = "off"
    conditional_eff_isl_threshold: Annotated[
        int, Meta(ge=0, description="little is left: fewer uncached tokens than this, and also")
    ] = 2048
    conditional_eff_isl_ratio_threshold: Annotated[
        float, Meta(ge=0, description="a smaller fraction of the prompt than this")
    ] = 0.7
    conditional_prefill_busy_threshold: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description=(
                "prefill workers are busy: more prompt tokens to compute than this "
                "multiple of a step"
            )
        ),
    ] = None
    conditional_decode_busy_threshold: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(
            description=("not on a decode worker with more than this fraction of its blocks in use")
        ),
    ] = None

    @property
    def conditional(self) -> Conditional | None:
        """When prompts are computed where they are answered; None: only where they have to be."""
        if self.conditional_disagg == "off":
            return None
        return Conditional(
            self.conditional_disagg,
            self.conditional_eff_isl_threshold,
            self.conditional_eff_isl_ratio_threshold,
            self.conditional_prefill_busy_threshold,
            self.conditional_decode_busy_threshold,
        )


def check_prefill(config: PrefillConfig) -> None:
    """What contradicts itself. Raises ConfigError."""
    policy = config.conditional_disagg
    if policy != "off" and config.disaggregation == "off":
        allowed = "off, or disaggregation=auto"
        raise ConfigError("conditional_disagg", f"{policy}, without disaggregation", allowed)
    key, needs_load = "conditional_prefill_busy_threshold", policy not in ("off", "isl_bounding")
    if needs_load and config.conditional_prefill_busy_threshold is None:
        raise ConfigError(key, f"missing, with {policy}", "a part of a step's tokens, such as 2")
