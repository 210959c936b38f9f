"""Errors of requests that cannot be placed; part of the tree in `errors`.

KvRouterError
├── NoEndpointsError             no worker may serve it
├── WorkersOverloadedError       all workers that may serve it are overloaded
└── PolicyFailedError            a custom policy broke its contract
"""

from collections.abc import Sequence

from router.errors import KvRouterError
from router.protocol.replies import RemovedRanks


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


class PolicyFailedError(KvRouterError):
    """A custom policy raised an exception, or returned an unusable result."""

    code = "policy_failed"

    def __init__(self, policy: str, step: str, reason: str) -> None:
        super().__init__(f"policy {policy}: {step}: {reason}")
        self.policy = policy
        self.step = step
        self.reason = reason
