"""Totals of reported usage by worker, model and tenant, and findings of misprediction.

usage ─▶ Observation ─ outcome ─▶ Evidence of (worker, tenant), (worker), (tenant), all
            └─ a surplus that the index does not show: looked for again, LATER_S later
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from math import inf
from typing import TypeAlias

from msgspec import Struct, structs

from router.accuracy.diagnosis import Diagnosis, likely_diagnoses
from router.accuracy.observation import (
    AccuracyOutcome,
    Observation,
    Shown,
    is_surplus,
    outcome_of,
    shows,
    surplus_outcome,
)
from router.accuracy.sequential_test import Counts, GroupEvidence, Symptom

LATER_S = 0.5
"""The delay before the index is checked again for blocks that it did not show."""

PATIENCE_S = 5.0
"""The time after which an index that was never proven up to date counts as such."""

MAX_LATER = 256
"""The limit of requests that wait for another check; beyond it, the oldest are not judged."""

MAX_GROUPS = 4_096
"""The limit of known groups; beyond it, those longest without a request are forgotten."""

Look: TypeAlias = Callable[[], Shown | None]
"""A function that returns the index's current state for a prompt, or None if it is unknown."""


class Group(Struct, frozen=True):
    """A group of requests: of a model and routing group, one worker or all, one tenant or all.

    None stands for all.
    """

    model_name: str
    routing_group: str
    worker_id: int | None = None
    tenant: str | None = None


class Finding(Struct, frozen=True):
    """A group that is mispredicted for a reason. `requests` support it, since `since_s`."""

    group: Group
    symptoms: list[Symptom]
    requests: int
    since_s: float
    causes: list[Diagnosis]


_Key: TypeAlias = tuple[str, str, int | None, str | None]


class _Later(Struct, frozen=True):
    """A surplus that the index did not show at the time of the report, and the next check of it."""

    due_s: float
    reported_s: float
    seen: Observation
    look: Look


class AccuracyMonitor:
    """The evidence by group. `forgotten`, `unjudged`: groups and requests over the limits."""

    __slots__ = ("_evidence", "_later", "forgotten", "unjudged")

    def __init__(self) -> None:
        self._evidence: OrderedDict[_Key, GroupEvidence] = OrderedDict()
        self._later: deque[_Later] = deque()
        self.forgotten = 0
        self.unjudged = 0

    def note(self, seen: Observation, look: Look, now_s: float) -> None:
        """Record a usage report. O(1), except for `look`.

        `look` is called if more was cached than predicted.
        """
        groups = self._of(seen)
        for evidence in groups:
            evidence.count(seen, now_s)
        if not is_surplus(seen):
            outcome = outcome_of(seen)
            for evidence in groups:
                evidence.judge(seen, outcome, None, now_s)
            return
        shown = look()
        if shown is None:
            self._judge(seen, AccuracyOutcome.QUIET, None, now_s)
        elif shows(seen, shown):
            self._judge(seen, surplus_outcome(seen), shown, now_s)
        else:
            self._put_off(_Later(now_s + LATER_S, now_s, seen, look))

    def settle(self, now_s: float) -> None:
        """Judge the requests with a due check. O(those)."""
        while self._later and self._later[0].due_s <= now_s:
            later = self._later.popleft()
            shown = later.look()
            if shown is None:
                self._judge(later.seen, AccuracyOutcome.QUIET, None, now_s)
            elif shows(later.seen, shown):
                self._judge(later.seen, AccuracyOutcome.LATE, shown, now_s)
            elif _is_conclusive(later, shown, now_s):
                self._judge(later.seen, AccuracyOutcome.UNSHOWN, shown, now_s)
            else:
                self._put_off(structs.replace(later, due_s=now_s + LATER_S))

    def findings(self) -> list[Finding]:
        """Return the groups with a symptom, the widest first. O(groups)."""
        found = [
            _finding(Group(*key), evidence, raised)
            for key, evidence in self._evidence.items()
            if (raised := evidence.raised)
        ]
        return sorted(found, key=lambda each: _width(each.group))

    def counts(self) -> Iterator[tuple[Group, Counts]]:
        """Return the totals of every group, longest without a request first."""
        return ((Group(*key), each.counts) for key, each in self._evidence.items())

    def _put_off(self, later: "_Later") -> None:
        self._later.append(later)
        if len(self._later) > MAX_LATER:
            self._later.popleft()
            self.unjudged += 1

    def _judge(
        self, seen: Observation, outcome: AccuracyOutcome, shown: Shown | None, now_s: float
    ) -> None:
        for evidence in self._of(seen):
            evidence.judge(seen, outcome, shown, now_s)

    def _of(self, seen: Observation) -> list[GroupEvidence]:
        """Return the evidence of every group that a request belongs to."""
        model, group = seen.scope.model_name, seen.scope.routing_group
        tenants = (None,) if seen.tenant is None else (None, seen.tenant)
        return [
            self._of_key((model, group, worker_id, tenant))
            for tenant in tenants
            for worker_id in (None, seen.worker_id)
        ]

    def _of_key(self, key: _Key) -> GroupEvidence:
        evidence = self._evidence.get(key)
        if evidence is not None:
            self._evidence.move_to_end(key)
            return evidence
        evidence = self._evidence[key] = GroupEvidence()
        if len(self._evidence) > MAX_GROUPS:
            self._evidence.popitem(last=False)
            self.forgotten += 1
        return evidence


def _is_conclusive(later: _Later, shown: Shown, now_s: float) -> bool:
    """Return whether blocks that are not shown yet count as never shown."""
    return not -inf < shown.fresh_at_s < later.reported_s or now_s >= later.reported_s + PATIENCE_S


def _finding(group: Group, evidence: GroupEvidence, raised: list[Symptom]) -> Finding:
    suspicions = [evidence.suspicions[symptom] for symptom in raised]
    return Finding(
        group,
        raised,
        max(each.tally.requests for each in suspicions),
        min(each.since_s for each in suspicions),
        likely_diagnoses(evidence),
    )


def _width(group: Group) -> tuple[int, str, str, int, str]:
    narrow = (group.worker_id is not None) + (group.tenant is not None)
    worker_id = -1 if group.worker_id is None else group.worker_id
    return narrow, group.model_name, group.routing_group, worker_id, group.tenant or ""
