"""What goes wrong on the way to an engine and back.

KvRouterError
├── WorkerFailedError        a worker did not answer, broke off, or refused what another may take
├── NoWorkerLeftError        …, and there is no other to try
├── NoWorkerNamedError       the direct router goes where the request says, and it says nothing
└── RouteNotFoundError       nothing is served there
"""

from collections.abc import Sequence

from router.errors import InvalidFieldError, KvRouterError


class WorkerFailedError(KvRouterError):
    """A worker failed a request that another may serve. `is_its_fault`: it counts against it."""

    code = "worker_failed"
    http_status = 502

    def __init__(self, worker_id: int, reason: str, *, is_its_fault: bool = True) -> None:
        super().__init__(f"worker {worker_id}: {reason}")
        self.worker_id = worker_id
        self.reason = reason
        self.is_its_fault = is_its_fault


class NoWorkerLeftError(KvRouterError):
    """Every worker that may be tried has failed this request. `attempts`: how many did."""

    code = "no_worker_left"
    http_status = 502

    def __init__(self, attempts: int, last: str) -> None:
        super().__init__(f"{attempts} tried, none answered; the last: {last}")
        self.attempts = attempts
        self.last = last


class NoWorkerNamedError(InvalidFieldError):
    """A direct router was not told where to go."""

    code = "no_worker_named"

    def __init__(self) -> None:
        super().__init__(
            "x-worker-id",
            "missing; this router sends requests where they say",
            "a worker's id, as x-worker-id, x-worker-instance-id or nvext.backend_instance_id",
        )


class RouteNotFoundError(KvRouterError):
    """There is nothing here."""

    code = "not_found"
    http_status = 404

    def __init__(self, route: str, routes: Sequence[str]) -> None:
        super().__init__(f"{route[:200]} is not served (allowed: {', '.join(routes)})")
        self.allowed = list(routes)
