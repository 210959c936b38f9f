"""Sequential tests: evidence for a symptom adds up, evidence against it takes away.

A score never falls below 0, so whatever was right before, a few requests are enough; it is raised
at a threshold, and taken back only at 0. Where a fraction q < ½ of requests is merely unlucky, the
probability that a run of them reaches the threshold is (q / (1 − q)) ^ threshold.
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType

from router.closed_loop.observation import Outcome
from router.closed_loop.tallies import Tally


class Symptom(enum.StrEnum):
    """What is wrong, whatever the cause.

    `length`: engines count prompts otherwise. `unshown`: they reuse what the index shows at no
    time. `more`: they reuse more than was shown when it was asked. `unused`: nothing of what is
    predicted; `tiers_unused`: nothing of what lies in lower tiers.
    """

    LENGTH = "length"
    UNSHOWN = "unshown"
    MORE = "more"
    UNUSED = "unused"
    TIERS_UNUSED = "tiers_unused"


THRESHOLDS: Mapping[Symptom, int] = MappingProxyType(
    {
        Symptom.LENGTH: 6,
        Symptom.UNSHOWN: 8,
        Symptom.MORE: 24,
        Symptom.UNUSED: 12,
        Symptom.TIERS_UNUSED: 20,
    }
)

WEIGHTS: Mapping[Outcome, Mapping[Symptom, int]] = MappingProxyType(
    {
        Outcome.QUIET: {},
        Outcome.AGREED: {Symptom.UNSHOWN: -1, Symptom.MORE: -1, Symptom.UNUSED: -2},
        Outcome.LESS: {Symptom.UNSHOWN: -1, Symptom.UNUSED: -2},
        Outcome.SHARED: {Symptom.UNSHOWN: -1},
        Outcome.MORE: {Symptom.UNSHOWN: -1, Symptom.MORE: 4},
        Outcome.LATE: {Symptom.UNSHOWN: -1, Symptom.MORE: -2},
        Outcome.UNSHOWN: {Symptom.UNSHOWN: 1},
        Outcome.UNUSED: {Symptom.UNUSED: 1},
        Outcome.TIERS_UNUSED: {
            Symptom.UNSHOWN: -1, Symptom.UNUSED: -2, Symptom.TIERS_UNUSED: 1,
        },
    }
)  # fmt: skip
"""What an outcome says for (above 0) or against each symptom: more, the rarer it is where
nothing is wrong. Of a tier that nobody tells of, one prompt in five that finds something there will
do.
"""


class Suspicion:
    """One symptom of one group of requests. `tally`: of the requests since its score was 0."""

    __slots__ = ("_threshold", "is_raised", "score", "since_s", "tally")

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self.score = 0
        self.is_raised = False
        self.since_s = 0.0
        self.tally = Tally()

    def add(self, weight: int, now_s: float) -> None:
        """A request speaks for it, or against it. Beyond twice the threshold nothing is added, so
        that it is taken back soon once the cause is gone.
        """
        if self.score == 0 and weight > 0:
            self.tally = Tally()
            self.since_s = now_s
        self.score = min(max(self.score + weight, 0), 2 * self._threshold)
        if self.score == 0:
            self.is_raised = False
        elif self.score >= self._threshold:
            self.is_raised = True
