"""Errors between a client's request and an engine's response.

KvRouterError
├── WorkerFailedError        a worker did not respond, broke off, or refused what another may take
│   └── NoHandOverError      it computed a prompt, and returned no parameters for its transfer
├── NoWorkerLeftError        a worker failed, and there is no other to try
├── PrefillFailedError       no worker has computed a prompt
├── PromptRefusedError       a worker refused a prompt, as others will
├── RouteMissingError        a worker's engine does not have the route that is passed on
├── RouteNotServedError      no worker of the model has it
├── ModelNotFoundError       no worker has, or ever had, the requested model
├── ResponseNotFoundError    no engine is known to keep this response
├── NoWorkerNamedError       direct mode requires a worker in the request, which names none
├── TooMuchAtOnceError       the bodies of all requests in flight exceed the limit
├── SteeringRefusedError     a field steers the engine, and the caller may not
├── GatewayModeError         a gateway sends bodies in a mode in which they cannot be placed
├── PreconditionError        a request that prefers not to wait would have to wait
├── RouteNotFoundError       the path is not served
└── MethodNotAllowedError    the path is served with other methods
"""

from collections.abc import Sequence

from router.client import UnansweredError
from router.errors import InvalidFieldError, KvRouterError
from router.protocol.replies import Decision
from router.runtime.http_client import NeverSentError, UpstreamError, UpstreamResponse
from router.scheduler.errors import SloNotMetError


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
    """A prefill worker returned no KV transfer parameters: its engine lacks the configuration."""

    code = "no_hand_over"

    def __init__(self, worker_id: int) -> None:
        reason = "computed a prompt, and returned no kv_transfer_params for the decode worker"
        super().__init__(worker_id, reason, is_its_fault=False)


class RouteMissingError(WorkerFailedError):
    """The engine of a worker does not have this route: it serves another kind of model."""

    code = "route_missing"

    def __init__(self, worker_id: int, path: str) -> None:
        super().__init__(worker_id, f"has no {path}", is_its_fault=False)


class RouteNotServedError(KvRouterError):
    """No worker of the model has this route. Engines have one by their kind, model and flags."""

    code = "route_not_served"
    http_status = 404

    def __init__(self, path: str, model_name: str, engines: Sequence[str]) -> None:
        kinds = ", ".join(engines)
        super().__init__(
            f"{path} is served by no worker of model {model_name!r} (allowed: a model whose engine "
            f"has it, such as {kinds})"
        )
        self.path = path
        self.model_name = model_name


class PrefillFailedError(KvRouterError):
    """Every tried prefill worker failed. `attempts`: number of workers tried."""

    code = "prefill_failed"
    http_status = 502

    def __init__(self, attempts: int, last: str) -> None:
        super().__init__(f"prompt: {attempts} tried, none computed it; the last: {last}")
        self.attempts = attempts
        self.last = last


class PromptRefusedError(KvRouterError):
    """A worker refused a prompt as invalid."""

    code = "prompt_refused"
    http_status = 502

    def __init__(self, worker_id: int, status: int) -> None:
        super().__init__(f"worker {worker_id}: status {status}")
        self.worker_id = worker_id
        self.status = status


class NoWorkerLeftError(KvRouterError):
    """Every worker that may be tried has failed this request. `attempts`: number tried."""

    code = "no_worker_left"
    http_status = 502

    def __init__(self, attempts: int, last: str) -> None:
        super().__init__(f"{attempts} tried, none answered; the last: {last}")
        self.attempts = attempts
        self.last = last


class ModelNotFoundError(KvRouterError):
    """Workers exist, and none ever served this model."""

    code = "model_not_found"
    http_status = 404

    def __init__(self, model_name: str, models: Sequence[str]) -> None:
        served = ", ".join(models)[:500]
        super().__init__(f"model: {model_name!r} is not served (allowed: {served})")
        self.model_name = model_name
        self.allowed = list(models)


class ResponseNotFoundError(KvRouterError):
    """No engine is known to keep a response; in the words of engines that keep none."""

    code = "response_not_found"
    http_status = 404

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Response with id '{response_id[:256]}' not found.")
        self.field = "response_id"


class NoWorkerNamedError(InvalidFieldError):
    """A request in direct mode names no worker."""

    code = "no_worker_named"

    def __init__(self) -> None:
        super().__init__(
            "x-worker-id",
            "missing: in direct mode a request names its worker",
            "a worker's id, as x-worker-id, x-worker-instance-id or nvext.backend_instance_id",
        )


class SteeringRefusedError(InvalidFieldError):
    """A field steers the engine, and the caller may not."""

    code = "steering_refused"

    def __init__(self, field: str) -> None:
        problem = "steers the engine, which this token may not"
        super().__init__(field, problem, "without it, or with scope steer", status=422)


class GatewayModeError(KvRouterError):
    """A gateway sends bodies in a mode in which a request cannot be placed by its prompt."""

    code = "gateway_mode"

    def __init__(self, mode: int) -> None:
        allowed = "FULL_DUPLEX_STREAMED, or BUFFERED"
        super().__init__(f"request_body_mode of the gateway's filter: {mode} (allowed: {allowed})")
        self.mode = mode


class PreconditionError(KvRouterError):
    """A request with `Prefer: if-available` would have to wait."""

    code = "not_available"
    http_status = 412

    def __init__(self, reason: str) -> None:
        super().__init__(f"prefer: if-available, and no worker is: {reason}")


class RouteNotFoundError(KvRouterError):
    """The path is not served."""

    code = "not_found"
    http_status = 404

    def __init__(self, route: str, routes: Sequence[str]) -> None:
        super().__init__(f"{route[:200]} is not served (allowed: {', '.join(routes)})")
        self.allowed = list(routes)


class MethodNotAllowedError(KvRouterError):
    """The path is served with other methods only."""

    code = "method_not_allowed"
    http_status = 405

    def __init__(self, route: str, methods: Sequence[str]) -> None:
        super().__init__(f"{route[:200]} is not served (allowed: {', '.join(methods)})")
        self.methods = tuple(methods)


class EngineRefusedError(WorkerFailedError):
    """An engine's refusal, with its response."""

    def __init__(self, decision: Decision, answer: UpstreamResponse, body: bytes) -> None:
        status = answer.status
        is_its_fault = status not in NOT_ITS_FAULT
        super().__init__(decision.worker_id, f"status {status}", is_its_fault=is_its_fault)
        self.answer = answer
        self.decision = decision
        self.content = body


def reason_of(error: Exception) -> str:
    """Return the reason of a failure for clients, without addresses of engines and routers."""
    if isinstance(error, UnansweredError):
        return "the router does not respond"
    if isinstance(error, NeverSentError):
        return error.problem
    if isinstance(error, UpstreamError):
        return f"{error.problem}{f': {error.detail}' if error.detail else ''}"
    return str(error)


ANOTHER_MAY_TAKE = frozenset((408, 425, 429, 500, 502, 503, 504))
"""Refusals by one engine that do not hold for others."""

NOT_ITS_FAULT = frozenset((408, 425, 429))


def error_status(error: KvRouterError) -> int:
    """Return the status for OpenAI clients, which expect 400 for every invalid request.

    A request that is valid, and not permitted, keeps its 422.
    """
    is_invalid = error.http_status == 422 and not isinstance(error, SteeringRefusedError)
    return 400 if is_invalid else error.http_status


def error_response(error: KvRouterError) -> dict[str, object]:
    """Return an error in OpenAI's format."""
    kind = "invalid_request_error" if error.http_status < 500 else "server_error"
    param = error.body().get("field")
    code: str | int = error.http_status if isinstance(error, ResponseNotFoundError) else error.code
    more: dict[str, object] = {}
    if isinstance(error, SloNotMetError):
        kind = "rate_limit_error"
        more = {name: error.body()[name] for name in ("predicted_ttft_s", "predicted_tpot_s")}
    said = {"message": reason_of(error), "type": kind, "param": param, "code": code, **more}
    return {"error": said}
