"""Errors of requests that cannot be placed; part of the tree in `errors`.

KvRouterError
├── NoEndpointsError             no worker may serve it
├── WorkersOverloadedError       all workers that may serve it are overloaded
├── SloNotMetError               no worker is predicted to meet its objectives
└── PolicyFailedError            a custom policy broke its contract
"""

from collections.abc import Sequence

from router.errors import KvRouterError
from router.protocol.replies import RemovedRanks

SHORTEST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
"""Limits of the suggested time to retry."""


def suggested_retry_s(seconds: float) -> float:
    """Return the time after which to send a request again, within limits."""
    return min(max(seconds, SHORTEST_RETRY_S), LONGEST_RETRY_S)


class NoEndpointsError(KvRouterError):
    """No worker can take the request; `removed`: the ranks that each filter removed, in order.

    `retry_after_s`: set if the request has waited for a worker.
    """

    code = "no_endpoints"
    http_status = 503

    def __init__(
        self,
        model_name: str,
        routing_group: str,
        reason: str,
        removed: Sequence[RemovedRanks] = (),
        retry_after_s: float | None = None,
    ) -> None:
        who = "".join(f"; {each}" for each in removed)
        super().__init__(f"{reason} for model={model_name} routing_group={routing_group}{who}")
        self.model_name = model_name
        self.routing_group = routing_group
        self.reason = reason
        self.removed = removed
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


class WorkersOverloadedError(KvRouterError):
    """All eligible workers are overloaded; `worker_id`: the worker the request is pinned to."""

    code = "workers_overloaded"
    http_status = 529

    def __init__(self, worker_id: int | None = None, removed: Sequence[RemovedRanks] = ()) -> None:
        pinned = f"worker {worker_id}, where the request is pinned to, is overloaded"
        reason = "all eligible workers are overloaded" if worker_id is None else pinned
        super().__init__(reason + "".join(f"; {each}" for each in removed))
        self.worker_id = worker_id
        self.removed = removed


class SloNotMetError(KvRouterError):
    """No rank is predicted to meet the objectives of a request, which is refused early.

    `predicted_ttft_s`, with the time in the queue, and `predicted_tpot_s`: of the rank that comes
    nearest to them. An objective that there is none of is null.
    """

    code = "slo_not_met"
    http_status = 429

    def __init__(
        self,
        policy_class: str,
        slo_ttft_ms: float | None,
        slo_tpot_ms: float | None,
        predicted_ttft_s: float,
        predicted_tpot_s: float,
        retry_after_s: float,
    ) -> None:
        first = slo_ttft_ms is not None and predicted_ttft_s * 1e3 > slo_ttft_ms
        field, asked_ms, predicted_s = "slo_tpot_ms", slo_tpot_ms, predicted_tpot_s
        if first:
            field, asked_ms, predicted_s = "slo_ttft_ms", slo_ttft_ms, predicted_ttft_s
        super().__init__(
            f"{field}: {asked_ms:g} ms cannot be met: {predicted_s * 1e3:.0f} ms are predicted at "
            f"best (allowed: a later attempt, a longer objective, or slo_unmet = place)"
        )
        self.field = field
        self.policy_class = policy_class
        self.slo_ttft_ms = slo_ttft_ms
        self.slo_tpot_ms = slo_tpot_ms
        self.predicted_ttft_s = round(predicted_ttft_s, 6)
        self.predicted_tpot_s = round(predicted_tpot_s, 6)
        self.retry_after_s = retry_after_s


class PolicyFailedError(KvRouterError):
    """A custom policy raised an exception, or returned an unusable result."""

    code = "policy_failed"

    def __init__(self, policy: str, step: str, reason: str) -> None:
        super().__init__(f"policy {policy}: {step}: {reason}")
        self.policy = policy
        self.step = step
        self.reason = reason
