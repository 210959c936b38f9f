"""Prometheus metrics of decisions.

No objects of the Prometheus client are used per decision. One decision in 32 at most is timed.
"""

from collections.abc import Mapping

from router.runtime.process.metrics import Rows, Times, counter, histogram
from router.sequence.active.stages import STAGES, Stages

COMMANDS = ("select", "select_and_reserve")
ROLES = ("aggregated", "prefill", "decode")

_DECISION_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_STAGE_S = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)

_TIMED = "of one in 32, at most 10 a second"


class DecisionTotals:
    """Counts of decisions, their times, and their predicted cached tokens."""

    __slots__ = (
        "_stages",
        "decided",
        "predicted_cached_tokens",
        "prompt_tokens",
        "seconds",
        "sources_named",
    )

    def __init__(self) -> None:
        self.decided = dict.fromkeys(COMMANDS, 0)
        self.prompt_tokens = self.predicted_cached_tokens = self.sources_named = 0
        self.seconds = Times(_DECISION_S)
        self._stages = {(stage, role): Times(_STAGE_S) for stage in STAGES for role in ROLES}

    def note(
        self,
        command: str,
        role: str,
        isl_tokens: int,
        cached_tokens: int,
        stages: Stages | None,
        *,
        has_source: bool = False,
    ) -> None:
        """Count a placed request.

        `stages`: None if it was not timed. `has_source`: the decision names another rank from which
        more of the prompt can be loaded.
        """
        self.decided[command] += 1
        self.prompt_tokens += isl_tokens
        self.predicted_cached_tokens += cached_tokens
        self.sources_named += has_source
        if stages is None:
            return
        self.seconds.note(stages.total_s - stages.waited_s)
        for stage, seconds in zip(STAGES, stages.seconds, strict=True):
            if seconds:
                self._stages[stage, role].note(seconds)

    @property
    def totals(self) -> tuple[int, int, int]:
        """The numbers of decisions, of their prompt tokens, and of those predicted cached."""
        return sum(self.decided.values()), self.prompt_tokens, self.predicted_cached_tokens

    def stage_seconds(self) -> Mapping[tuple[str, str], Times]:
        """Return the times of the stages that took place, by stage and role."""
        return {labels: times for labels, times in self._stages.items() if times.sum_s}


DECISION_METRICS: Rows = {
    "decisions": counter("Ranks chosen", "decided", "command"),
    "prompt_tokens": counter("Prompt tokens of chosen requests"),
    "predicted_cached_tokens": counter("Prompt tokens predicted to be cached where they were sent"),
    "sources_named": counter("Decisions that named another rank to load more of the prompt from"),
    "decision_seconds": histogram(
        f"Time to hash, match, weigh and book a request; {_TIMED}", "seconds"
    ),
    "decision_stage_seconds": histogram(
        f"Time of each stage of a decision, by the role of the chosen worker; {_TIMED}",
        DecisionTotals.stage_seconds,
        "stage",
        "worker_type",
    ),
}
