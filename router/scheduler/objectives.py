"""Objectives of requests: what is asked for, by whom it can be met, and when a request is refused.

request, else its policy class ─▶ Objectives ─▶ Limits, as predictions are compared with them
                                       └ judge: of the choice ─▶ Promise, or SloNotMetError
"""

from collections.abc import Callable
from math import inf

import numpy as np
from msgspec import Struct

from router.protocol.requests import SelectRequest, Unmet
from router.protocol.values import Phase, Scope
from router.scheduler.errors import SloNotMetError, suggested_retry_s
from router.scheduler.policy._predicted_parts import (
    MEASURED_BURSTS,
    PREFILL_OWN_S,
    QUEUE_S,
    TPOT_S,
)
from router.scheduler.queue.policy_classes import Classes, PolicyClass, QueuePolicies
from router.scheduler.selector import Choice
from router.scheduler.terms import FloatArray
from router.sequence.active.promises import Errors, Promise
from router.sequence.rank_table import BURSTS


class Objectives(Struct, frozen=True, gc=False):
    """The objectives of a request, in seconds; infinite where there is none.

    `waited_s`: in this router, which counts towards the first token. `is_refused`: it is refused if
    no rank is predicted to meet them.
    """

    scope: Scope
    policy_class: str
    ttft_s: float
    tpot_s: float
    waited_s: float
    is_refused: bool

    @property
    def left_s(self) -> float:
        """The time left until the first token."""
        return max(self.ttft_s - self.waited_s, 0.0)


class ObjectiveRules:
    """The objectives of requests without their own, by policy class; `unmet`: what then happens."""

    __slots__ = ("_policies", "_unmet", "has_defaults")

    def __init__(self, policies: QueuePolicies, unmet: Unmet) -> None:
        self._policies = policies
        self._unmet = unmet
        self.has_defaults = policies.have_objectives

    def of(
        self,
        request: SelectRequest,
        waited_s: float,
        uncached_tokens: Callable[[], int],
    ) -> Objectives | None:
        """Return a request's objectives, or None without any.

        `uncached_tokens`: of its prompt; called if its class depends on them.
        """
        classes = self._policies.classes(request.model_name)
        policy_class = _class_of(classes, request, uncached_tokens)
        ttft_ms, tpot_ms = request.slo_ttft_ms, request.slo_tpot_ms
        ttft_ms = policy_class.slo_ttft_ms if ttft_ms is None else ttft_ms
        tpot_ms = policy_class.slo_tpot_ms if tpot_ms is None else tpot_ms
        phase: Phase | None = request.phase
        ttft_s = inf if ttft_ms is None or phase == "decode" else ttft_ms / 1e3
        tpot_s = inf if tpot_ms is None or phase == "prefill" else tpot_ms / 1e3
        if ttft_s == tpot_s == inf:
            return None
        unmet = request.slo_unmet or policy_class.slo_unmet or self._unmet
        known = (request.scope, policy_class.name, ttft_s, tpot_s, waited_s)
        return Objectives(*known, unmet == "refuse")


def _class_of(
    classes: Classes, request: SelectRequest, uncached_tokens: Callable[[], int]
) -> PolicyClass:
    index = classes.certain(request.policy_class)
    if index is None:
        index = classes.index(request.policy_class, uncached_tokens())
    return classes.all[index]


def limits(asked: Objectives, errors: Errors) -> tuple[float, float]:
    """Return the predicted times up to which a rank counts as one that meets the objectives.

    They are met there by four requests in five.
    """
    return asked.left_s / errors.ttft.high, asked.tpot_s / errors.tpot.high


def judge(
    asked: Objectives,
    choice: Choice,
    predicted_s: FloatArray,
    errors: Errors,
    *,
    may_refuse: bool,
) -> Promise:
    """Return the promise to a request that was placed, or raise SloNotMetError.

    It is refused if no rank is likely to meet its objectives, by what predictions proved to be
    worth. Ranks that are not yet measured may meet anything. `predicted_s`: as `predictive` writes
    it, a row per candidate.
    """
    ttft_s = predicted_s[:, QUEUE_S : PREFILL_OWN_S + 1].sum(axis=1) * errors.ttft.likely
    tpot_s = predicted_s[:, TPOT_S] * errors.tpot.likely
    late_s = np.maximum(ttft_s - asked.left_s, 0) + np.maximum(tpot_s - asked.tpot_s, 0)
    is_measured = choice.table.values[:, BURSTS] >= MEASURED_BURSTS
    if may_refuse and asked.is_refused and late_s.all() and is_measured.all():
        best = int(late_s.argmin())
        retry_s = suggested_retry_s(float(ttft_s[best]) - asked.left_s)
        best_s = (asked.waited_s + float(ttft_s[best]), float(tpot_s[best]))
        raise SloNotMetError(
            asked.policy_class, _ms(asked.ttft_s), _ms(asked.tpot_s), *best_s, retry_s
        )
    row = predicted_s[choice.index]
    return Promise(
        asked.scope,
        asked.policy_class,
        asked.ttft_s,
        asked.tpot_s,
        asked.waited_s,
        float(row[QUEUE_S : PREFILL_OWN_S + 1].sum()),
        float(row[TPOT_S]),
        not late_s[choice.index],
    )


def _ms(objective_s: float) -> float | None:
    return None if objective_s == inf else round(objective_s * 1e3, 3)
