"""Why a request cannot be placed; part of the tree in `errors`.

KvRouterError
├── NoEndpointsError             nobody may serve it
├── WorkersOverloadedError       all who may serve it have more than enough to do
└── PolicyFailedError            a policy that is not ours broke its contract
"""

from collections.abc import Sequence

from msgspec import Struct

from router.errors import KvRouterError


class RemovedRanks(Struct, frozen=True):
    """How many ranks a filter removed, and the first of them."""

    filter: str
    count: int
    ranks: list[str]

    def __str__(self) -> str:
        more = f" and {self.count - len(self.ranks)} more" if self.count > len(self.ranks) else ""
        return f"{self.filter} removed {', '.join(self.ranks)}{more}"


class NoEndpointsError(KvRouterError):
    """No worker can take the request; `removed`: which filter removed whom, in order."""

    code = "no_endpoints"
    http_status = 503

    def __init__(
        self,
        model_name: str,
        routing_group: str,
        reason: str,
        removed: Sequence[RemovedRanks] = (),
    ) -> None:
        who = "".join(f"; {each}" for each in removed)
        super().__init__(f"{reason} for model={model_name} routing_group={routing_group}{who}")
        self.model_name = model_name
        self.routing_group = routing_group
        self.reason = reason
        self.removed = removed


class WorkersOverloadedError(KvRouterError):
    """All workers that may take the request are overloaded; `worker_id`: where it is pinned to."""

    code = "workers_overloaded"
    http_status = 529

    def __init__(self, worker_id: int | None = None, removed: Sequence[RemovedRanks] = ()) -> None:
        pinned = f"worker {worker_id}, where the request is pinned to, is overloaded"
        reason = "all eligible workers are overloaded" if worker_id is None else pinned
        super().__init__(reason + "".join(f"; {each}" for each in removed))
        self.worker_id = worker_id
        self.removed = removed


class PolicyFailedError(KvRouterError):
    """A custom policy raised, or gave what cannot be decided on."""

    code = "policy_failed"

    def __init__(self, policy: str, step: str, reason: str) -> None:
        super().__init__(f"policy {policy}: {step}: {reason}")
        self.policy = policy
        self.step = step
        self.reason = reason
