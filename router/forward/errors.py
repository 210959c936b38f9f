"""What goes wrong on the way to an engine and back.

KvRouterError
├── WorkerFailedError        a worker did not answer, broke off, or refused what another may take
│   └── NoHandOverError      … it computed a prompt, and does not say how another gets at that
├── NoWorkerLeftError        …, and there is no other to try
├── PrefillFailedError       no worker has computed a prompt
├── PromptRefusedError       a worker refused a prompt, as others will
├── ModelNotFoundError       no worker has, or ever had, the model that is wanted
├── NoWorkerNamedError       the direct router goes where the request says, and it says nothing
├── TooMuchAtOnceError       the bodies of all requests in flight are more than is kept
├── RouteNotFoundError       nothing is served there
└── MethodNotAllowedError    something is, by other methods
"""

from collections.abc import Sequence

from router.client import UnansweredError
from router.errors import InvalidFieldError, KvRouterError
from router.http_client import NeverSentError, UpstreamError


class WorkerFailedError(KvRouterError):
    """A worker failed a request that another may serve. `is_its_fault`: it counts against it."""

    code = "worker_failed"
    http_status = 502

    def __init__(self, worker_id: int, reason: str, *, is_its_fault: bool = True) -> None:
        super().__init__(f"worker {worker_id}: {reason}")
        self.worker_id = worker_id
        self.reason = reason
        self.is_its_fault = is_its_fault


class NoHandOverError(WorkerFailedError):
    """A worker of role prefill that hands nothing over: its engine is not set up for that."""

    code = "no_hand_over"

    def __init__(self, worker_id: int) -> None:
        reason = "computed a prompt, and returned no kv_transfer_params for the decode worker"
        super().__init__(worker_id, reason, is_its_fault=False)


class PrefillFailedError(KvRouterError):
    """Workers that were to compute a prompt have failed. `attempts`: how many did."""

    code = "prefill_failed"
    http_status = 502

    def __init__(self, attempts: int, last: str) -> None:
        super().__init__(f"prompt: {attempts} tried, none computed it; the last: {last}")
        self.attempts = attempts
        self.last = last


class PromptRefusedError(KvRouterError):
    """A worker does not take a prompt, for what is wrong with it."""

    code = "prompt_refused"
    http_status = 502

    def __init__(self, worker_id: int, status: int) -> None:
        super().__init__(f"worker {worker_id}: status {status}")
        self.worker_id = worker_id
        self.status = status


class NoWorkerLeftError(KvRouterError):
    """Every worker that may be tried has failed this request. `attempts`: how many did."""

    code = "no_worker_left"
    http_status = 502

    def __init__(self, attempts: int, last: str) -> None:
        super().__init__(f"{attempts} tried, none answered; the last: {last}")
        self.attempts = attempts
        self.last = last


class ModelNotFoundError(KvRouterError):
    """There are workers, and never was one of this model."""

    code = "model_not_found"
    http_status = 404

    def __init__(self, model_name: str, models: Sequence[str]) -> None:
        served = ", ".join(models)[:500]
        super().__init__(f"model: {model_name!r} is not served (allowed: {served})")
        self.model_name = model_name
        self.allowed = list(models)


class NoWorkerNamedError(InvalidFieldError):
    """A direct router was not told where to go."""

    code = "no_worker_named"

    def __init__(self) -> None:
        super().__init__(
            "x-worker-id",
            "missing; this router sends requests where they say",
            "a worker's id, as x-worker-id, x-worker-instance-id or nvext.backend_instance_id",
        )


class TooMuchAtOnceError(KvRouterError):
    """The bodies of everybody's requests in flight are as much as may be kept of them."""

    code = "too_much_at_once"
    http_status = 503
    retry_after_s = 1.0

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"bodies: too much in flight (allowed: {limit_bytes} bytes in all)")
        self.limit_bytes = limit_bytes


class RouteNotFoundError(KvRouterError):
    """There is nothing here."""

    code = "not_found"
    http_status = 404

    def __init__(self, route: str, routes: Sequence[str]) -> None:
        super().__init__(f"{route[:200]} is not served (allowed: {', '.join(routes)})")
        self.allowed = list(routes)


class MethodNotAllowedError(KvRouterError):
    """There is something here, and nobody does that to it."""

    code = "method_not_allowed"
    http_status = 405

    def __init__(self, route: str, methods: Sequence[str]) -> None:
        super().__init__(f"{route[:200]} is not served (allowed: {', '.join(methods)})")
        self.methods = tuple(methods)


def reason_of(error: Exception) -> str:
    """What clients may know of a failure: all but where engines and routers listen."""
    if isinstance(error, UnansweredError):
        return "the router does not answer"
    if isinstance(error, NeverSentError):
        return error.problem
    if isinstance(error, UpstreamError):
        return f"{error.problem}{f': {error.detail}' if error.detail else ''}"
    return str(error)
