"""Sequential tests per group of requests: evidence changes the score of each symptom.

Sequential tests: evidence for a symptom raises its score, evidence against it lowers it.

A score never falls below 0, so a few requests suffice whatever came before. A symptom is raised at
a threshold, and cleared only at 0. If a fraction q < ½ of requests is merely unlucky, the
probability that a run of them reaches the threshold is (q / (1 − q)) ^ threshold.
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct

from router.accuracy.differences import DifferenceTotals
from router.accuracy.observation import AccuracyOutcome, Observation, Shown


class Symptom(enum.StrEnum):
    """A symptom of misprediction, independent of its cause.

    `length`: engines count other prompt lengths. `unshown`: they reuse blocks that the index never
    shows. `more`: they reuse more than the index showed at the decision. `unused`: they reuse none
    of the predicted blocks. `tiers_unused`: they reuse none of the predicted blocks in lower tiers.
    `earlier`: they resume prompts before the predicted place: of a hybrid model, or by one block.
    """

    LENGTH = "length"
    UNSHOWN = "unshown"
    MORE = "more"
    UNUSED = "unused"
    TIERS_UNUSED = "tiers_unused"
    EARLIER = "earlier"


THRESHOLDS: Mapping[Symptom, int] = MappingProxyType(
    {
        Symptom.LENGTH: 6,
        Symptom.UNSHOWN: 8,
        Symptom.MORE: 24,
        Symptom.UNUSED: 12,
        Symptom.TIERS_UNUSED: 20,
        Symptom.EARLIER: 16,
    }
)

WEIGHTS: Mapping[AccuracyOutcome, Mapping[Symptom, int]] = MappingProxyType(
    {
        AccuracyOutcome.QUIET: {},
        AccuracyOutcome.AGREED: {
            Symptom.UNSHOWN: -1, Symptom.MORE: -1, Symptom.UNUSED: -2, Symptom.EARLIER: -2,
        },
        AccuracyOutcome.LESS: {Symptom.UNSHOWN: -1, Symptom.UNUSED: -2},
        AccuracyOutcome.SHARED: {Symptom.UNSHOWN: -1},
        AccuracyOutcome.MORE: {Symptom.UNSHOWN: -1, Symptom.MORE: 4},
        AccuracyOutcome.LATE: {Symptom.UNSHOWN: -1, Symptom.MORE: -2},
        AccuracyOutcome.UNSHOWN: {Symptom.UNSHOWN: 1},
        AccuracyOutcome.UNUSED: {Symptom.UNUSED: 1},
        AccuracyOutcome.TIERS_UNUSED: {
            Symptom.UNSHOWN: -1, Symptom.UNUSED: -2, Symptom.TIERS_UNUSED: 1,
        },
        AccuracyOutcome.EARLIER: {Symptom.UNSHOWN: -1, Symptom.UNUSED: -2, Symptom.EARLIER: 1},
    }
)  # fmt: skip
"""The evidence of an outcome for (above 0) or against each symptom.

The rarer an outcome is in a correct setup, the larger its weight. If a tier is not reported, one
prompt in five that finds blocks there suffices for `more`.
"""


class SequentialTest:
    """One symptom of one group of requests. `tally`: of the requests since its score was 0."""

    __slots__ = ("_threshold", "is_raised", "score", "since_s", "tally")

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self.score = 0
        self.is_raised = False
        self.since_s = 0.0
        self.tally = DifferenceTotals()

    def add(self, weight: int, now_s: float) -> None:
        """Add evidence for the symptom, or against it.

        The score is limited to twice the threshold, so that the symptom is cleared soon after its
        cause is gone.
        """
        if self.score == 0 and weight > 0:
            self.tally = DifferenceTotals()
            self.since_s = now_s
        self.score = min(max(self.score + weight, 0), 2 * self._threshold)
        if self.score == 0:
            self.is_raised = False
        elif self.score >= self._threshold:
            self.is_raised = True


class Counts(Struct):
    """Totals of the requests with a usage report.

    `compared`: requests with a number of cached tokens; their cached, predicted and mispredicted
    tokens, the last being the sum of absolute differences.
    """

    requests: int = 0
    prompt_tokens: int = 0
    compared: int = 0
    cached_tokens: int = 0
    predicted_tokens: int = 0
    mispredicted_tokens: int = 0


class GroupEvidence:
    """The evidence of one group: a few hundred bytes, and as much again for each symptom."""

    __slots__ = ("counts", "suspicions")

    def __init__(self) -> None:
        self.counts = Counts()
        self.suspicions: dict[Symptom, SequentialTest] = {}

    @property
    def raised(self) -> list[Symptom]:
        """The raised symptoms."""
        return [symptom for symptom, each in self.suspicions.items() if each.is_raised]

    def count(self, seen: Observation, now_s: float) -> None:
        """Count a usage report, and test its prompt length, which needs no judgement."""
        counts, cached_tokens = self.counts, seen.cached_tokens
        counts.requests += 1
        counts.prompt_tokens += seen.prompt_tokens
        if cached_tokens is not None:
            counts.compared += 1
            counts.cached_tokens += cached_tokens
            counts.predicted_tokens += seen.predicted_tokens
            counts.mispredicted_tokens += abs(cached_tokens - seen.predicted_tokens)
        if seen.difference_tokens:
            self._add(Symptom.LENGTH, 1, seen, None, now_s)
        elif self.suspicions:
            self._add(Symptom.LENGTH, -1, seen, None, now_s)

    def judge(
        self, seen: Observation, outcome: AccuracyOutcome, shown: Shown | None, now_s: float
    ) -> None:
        """Add the outcome of a request, which is known by now."""
        for symptom, weight in WEIGHTS[outcome].items():
            self._add(symptom, weight, seen, shown, now_s)
        if self.suspicions and _uses_tiers(seen):
            self._add(Symptom.TIERS_UNUSED, -4, seen, shown, now_s)
        for suspicion in self.suspicions.values():
            suspicion.tally.note_outcome(seen, outcome)

    def _add(
        self, symptom: Symptom, weight: int, seen: Observation, shown: Shown | None, now_s: float
    ) -> None:
        suspicion = self.suspicions.get(symptom)
        if suspicion is None:
            if weight < 0:
                return
            suspicion = self.suspicions[symptom] = SequentialTest(THRESHOLDS[symptom])
        suspicion.add(weight, now_s)
        if weight > 0:
            suspicion.tally.note_for(seen, shown)
        elif not suspicion.score:
            del self.suspicions[symptom]


def _uses_tiers(seen: Observation) -> bool:
    """Return whether predicted blocks of lower tiers were reused."""
    return seen.device_tokens < min(seen.cached_tokens or 0, seen.predicted_tokens)
