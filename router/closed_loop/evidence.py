"""All that is known of one group of requests: totals, and how suspicious each symptom is."""

from msgspec import Struct

from router.closed_loop.observation import Observation, Outcome, Shown
from router.closed_loop.suspicion import THRESHOLDS, WEIGHTS, Suspicion, Symptom


class Counts(Struct):
    """Requests whose engine said how long their prompts were, and their tokens; of those that said
    what was cached (`compared`), how much was, was predicted, and by how much the two differ.
    """

    requests: int = 0
    prompt_tokens: int = 0
    compared: int = 0
    cached_tokens: int = 0
    predicted_tokens: int = 0
    mispredicted_tokens: int = 0


class Evidence:
    """Of one group. A few hundred bytes, and as much again for each symptom it has."""

    __slots__ = ("counts", "suspicions")

    def __init__(self) -> None:
        self.counts = Counts()
        self.suspicions: dict[Symptom, Suspicion] = {}

    @property
    def raised(self) -> list[Symptom]:
        """Symptoms it has."""
        return [symptom for symptom, each in self.suspicions.items() if each.is_raised]

    def count(self, seen: Observation, now_s: float) -> None:
        """A usage was told. That lengths differ needs no judgement."""
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

    def judge(self, seen: Observation, outcome: Outcome, shown: Shown | None, now_s: float) -> None:
        """What the request says is known by now."""
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
            suspicion = self.suspicions[symptom] = Suspicion(THRESHOLDS[symptom])
        suspicion.add(weight, now_s)
        if weight > 0:
            suspicion.tally.note_for(seen, shown)
        elif not suspicion.score:
            del self.suspicions[symptom]


def _uses_tiers(seen: Observation) -> bool:
    """Was something of lower tiers reused that was predicted to be there?"""
    return seen.device_tokens < min(seen.cached_tokens or 0, seen.predicted_tokens)
