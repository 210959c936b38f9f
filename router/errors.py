"""The one tree of exceptions.

Every error carries the facts as fields, a `code` for programs, and the HTTP status that says whose
fault it is (4xx the caller's, 5xx ours or the fleet's). `body()` is what a caller sees, over HTTP
and over NATS alike. Outcomes that belong to normal work (a duplicate event, a gap) are return
values, not exceptions.

    KvRouterError
    ├── InvalidFieldError            a field is missing, malformed or out of range
    │   └── MissingRequestIdError
    ├── MalformedBodyError           not JSON at all
    ├── UnsupportedMediaTypeError, BodyTooLargeError, BodyTimeoutError, ClientGoneError
    ├── DuplicateReservationError, ReservationNotFoundError, TooManyReservationsError
    ├── DeadlineExceededError        the caller does not wait any longer
    ├── SelectionNotFoundError       nothing pending to be reserved under this id
    ├── TooManyQueriesError          an agent answers one after the other, and a few wait already
    ├── WorkerNotFoundError, NoEndpointsError
    ├── WorkersOverloadedError       all who may serve a request have more than enough to do
    ├── PolicyFailedError            a policy that is not ours broke its contract
    ├── IndexDisabledError           the configuration says to keep no index
    ├── ShadowOffError               the configuration says to decide, not to compare
    ├── NoReplicaPeersError          routers find each other, nobody names them
    ├── …                            what the index alone refuses: see `index_errors`
    ├── …                            of blocks and their tokens: see `block_errors`
    ├── …                            of requests in a connector: see `slot_errors`
    ├── …                            of blocks that workers share: see `blockset_errors`
    ├── …                            of registered workers: see `registration_errors`
    ├── …                            of requests that would wait: see `queue_errors`
    ├── …                            what callers see without an answer: see `client/errors`
    ├── …                            of a fleet on one machine: see `local/errors`
    ├── ConfigError                  a setting, at start
    ├── WireError                    undecodable bytes on the bus
    ├── ServerError                  an HTTP server that a tool asked
    ├── SnapshotError                a kept index that can not be used
    ├── NormalizerStateError         undecodable bytes of what a normaliser kept
    ├── FeedStateError               unusable or unwritable file of what an agent knew
    ├── RecordingError               a recording that can not be read, or not further
    ├── TraceError                   a line of a trace of requests, for the simulator
    ├── TwinError                    another live process has this id
    └── BusError
        ├── BusUnavailableError      not connected, no answer in time
        ├── LogConflictError         somebody else wrote to our subject, or the store was lost
        └── LogFullError             the stream is at its configured limit
"""

from collections.abc import Sequence
from typing import ClassVar, Literal, TypeAlias

from msgspec import Struct

SnapshotProblem: TypeAlias = Literal[
    "foreign", "version", "damaged", "malformed", "torn", "too large", "other stream", "slow"
]

RecordingProblem: TypeAlias = Literal[
    "empty", "foreign", "version", "damaged", "cut off", "too long"
]


class KvRouterError(Exception):
    """Base of all errors of this project. `retry_after_s`: when to ask again, where that helps."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    retry_after_s: float | None = None

    def body(self) -> dict[str, object]:
        """What a caller sees: `error` (a sentence), `code`, and the error's own fields."""
        fields = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        return {"error": str(self), "code": self.code, **fields}


class InvalidFieldError(KvRouterError):
    """A field is missing, of the wrong type, or out of range."""

    code = "invalid_field"

    def __init__(self, field: str, reason: str, allowed: str, *, status: int = 400) -> None:
        super().__init__(f"{field}: {reason} (allowed: {allowed})")
        self.field = field
        self.reason = reason
        self.allowed = allowed
        self._status = status

    @property
    def http_status(self) -> int:  # type: ignore[override]
        """422 for a value of the wrong type or range, 400 for a missing or contradictory one."""
        return self._status


class MissingRequestIdError(InvalidFieldError):
    """A command that books came without an id to find the booking by."""

    code = "missing_request_id"

    def __init__(self) -> None:
        super().__init__(
            "request_id",
            "missing; a reservation needs an id",
            "a non-empty string, as request_id or as header x-request-id",
        )


class MalformedBodyError(KvRouterError):
    """The body is not the encoding it claims to be."""

    code = "malformed_body"
    http_status = 400

    def __init__(self, reason: str, allowed: str = "valid JSON in UTF-8") -> None:
        super().__init__(f"body: {reason} (allowed: {allowed})")
        self.reason = reason


class UnsupportedMediaTypeError(KvRouterError):
    """The content type is not one this route reads."""

    code = "unsupported_media_type"
    http_status = 415

    def __init__(
        self, content_type: str | None, allowed: Sequence[str] = ("application/json",)
    ) -> None:
        super().__init__(f"content-type: {content_type!r} (allowed: {', '.join(allowed)})")
        self.content_type = content_type


class BodyTooLargeError(KvRouterError):
    """The body exceeds the configured limit."""

    code = "body_too_large"
    http_status = 413

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"body: larger than the limit (allowed: at most {limit_bytes} bytes)")
        self.limit_bytes = limit_bytes


class BodyTimeoutError(KvRouterError):
    """The caller did not deliver its body in time."""

    code = "body_timeout"
    http_status = 408

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"body: not received in time (allowed: at most {limit_s} s)")
        self.limit_s = limit_s


class ClientGoneError(KvRouterError):
    """The caller hung up before it had said everything; nobody reads the answer."""

    code = "client_gone"
    http_status = 499

    def __init__(self) -> None:
        super().__init__("body: the caller hung up")


class DuplicateReservationError(KvRouterError):
    """The id is already booked; where, unless it waits."""

    code = "duplicate_reservation"
    http_status = 409

    def __init__(
        self, request_id: str, worker_id: int | None = None, dp_rank: int | None = None
    ) -> None:
        super().__init__(f"reservation {request_id} is already reserved")
        self.request_id = request_id
        self.worker_id = worker_id
        self.dp_rank = dp_rank


class ReservationNotFoundError(KvRouterError):
    """No live reservation has this id."""

    code = "reservation_not_found"
    http_status = 404

    def __init__(self, request_id: str) -> None:
        super().__init__(f"reservation {request_id} not found (freed, expired or never made)")
        self.request_id = request_id


class SelectionNotFoundError(KvRouterError):
    """Nothing was selected under this id, or not lately, or it is reserved already."""

    code = "selection_not_found"
    http_status = 404

    def __init__(self, selection_id: str, model_name: str, routing_group: str) -> None:
        where = f"model={model_name} routing_group={routing_group}"
        why = "(expired, already used, or never selected)"
        super().__init__(f"no pending selection {selection_id} for {where} {why}")
        self.selection_id = selection_id
        self.model_name = model_name
        self.routing_group = routing_group


class TooManyReservationsError(KvRouterError):
    """The configured number of live reservations is reached."""

    code = "too_many_reservations"
    http_status = 503

    def __init__(self, limit: int) -> None:
        super().__init__(f"reservations: the limit is reached (allowed: at most {limit} live ones)")
        self.limit = limit


class DeadlineExceededError(KvRouterError):
    """The answer would have come too late for its caller, for whom nothing is booked."""

    code = "deadline_exceeded"
    http_status = 504

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"no answer within the {timeout_s:g} s that the caller waits")
        self.timeout_s = timeout_s


class TooManyQueriesError(KvRouterError):
    """As many queries about a rank's events wait as may."""

    code = "busy"
    http_status = 503

    def __init__(self, limit: int) -> None:
        super().__init__(f"queries: the limit is reached (allowed: at most {limit} waiting ones)")
        self.limit = limit


class WorkerNotFoundError(KvRouterError):
    """No such worker, or no such rank of it, in the place asked about."""

    code = "worker_not_found"
    http_status = 404

    def __init__(self, worker_id: int, detail: str = "") -> None:
        super().__init__(f"worker {worker_id} not found{detail and ' ' + detail}")
        self.worker_id = worker_id


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


class IndexDisabledError(KvRouterError):
    """Somebody asks what the index holds, and the configuration says to keep none.

    409 rather than 503: the router is well, and asking again will not help.
    """

    code = "index_disabled"
    http_status = 409

    def __init__(self) -> None:
        super().__init__("no index is kept: overlap_score_weight is 0 (allowed: above 0, at start)")
        self.setting = "overlap_score_weight"


class ShadowOffError(KvRouterError):
    """Somebody asks how our choices differed from another router's, and none were compared.

    409 rather than 404: the route is there, and asking again will not help.
    """

    code = "shadow_off"
    http_status = 409

    def __init__(self) -> None:
        super().__init__("nothing is compared: this router decides (allowed: with --shadow)")
        self.setting = "shadow"


class NoReplicaPeersError(KvRouterError):
    """Somebody names a router to share reservations with; they find each other on the bus."""

    code = "no_replica_peers"
    http_status = 409

    def __init__(self) -> None:
        super().__init__(
            "replica sync with named peers is disabled: routers of a namespace share reservations "
            "over NATS (allowed: nats_url and router_replica_sync, at start)"
        )


class ConfigError(KvRouterError):
    """A setting is unknown, malformed or contradicts another."""

    code = "config"

    def __init__(self, key: str, reason: str, allowed: str) -> None:
        super().__init__(f"{key}: {reason} (allowed: {allowed})")
        self.key = key
        self.reason = reason
        self.allowed = allowed


class WireError(KvRouterError):
    """Bytes on the bus that are not what their subject promises."""

    code = "wire"
    http_status = 400

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ServerError(KvRouterError):
    """An HTTP server that a tool asked is not there, refuses, or says what nobody can read.

    `status`: of its answer, None where there was none.
    """

    code = "server"

    def __init__(self, url: str, reason: str, status: int | None = None) -> None:
        super().__init__(f"{url}: {reason}")
        self.url = url
        self.reason = reason
        self.status = status


class SnapshotError(KvRouterError):
    """A snapshot of an index that can not be used; `problem` says why in a word or two."""

    code = "snapshot"

    def __init__(self, problem: SnapshotProblem, detail: str) -> None:
        super().__init__(f"unusable snapshot ({problem}): {detail}")
        self.problem = problem
        self.detail = detail


class NormalizerStateError(KvRouterError):
    """What should be the kept state of a normaliser is none, or not of this version or identity."""

    code = "normalizer_state"

    def __init__(self, reason: str) -> None:
        super().__init__(f"unusable state of a normaliser: {reason}")
        self.reason = reason


class FeedStateError(KvRouterError):
    """The file in which an agent keeps what it knows of its engine cannot be used, or written."""

    code = "feed_state"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class RecordingError(KvRouterError):
    """A recording cannot be read, or not behind some line. `problem` says why in a word or two."""

    code = "recording"

    def __init__(self, problem: RecordingProblem, line: int, detail: str) -> None:
        super().__init__(f"line {line}: {detail}")
        self.problem = problem
        self.line = line
        self.detail = detail


class TraceError(KvRouterError):
    """A line of a trace of requests is malformed, or contradicts the lines above it."""

    code = "trace"

    def __init__(self, line: int, field: str, reason: str, allowed: str) -> None:
        super().__init__(f"line {line}: {field}: {reason} (allowed: {allowed})")
        self.line = line
        self.field = field
        self.reason = reason
        self.allowed = allowed


class TwinError(KvRouterError):
    """Another live process announces itself under the same id."""

    code = "twin"
    http_status = 409

    def __init__(self, key: str, detail: str) -> None:
        super().__init__(f"{key} is taken: {detail}")
        self.key = key
        self.detail = detail


class BusError(KvRouterError):
    """Something between us and the event bus."""

    code = "bus"
    http_status = 503


class BusUnavailableError(BusError):
    """The bus did not answer in time, or there is no connection."""

    code = "bus_unavailable"

    def __init__(self, reason: str) -> None:
        super().__init__(f"event bus unavailable: {reason}")
        self.reason = reason


class LogConflictError(BusError):
    """The subject's last sequence is not the expected one: a twin wrote, or the store was lost."""

    code = "log_conflict"

    def __init__(self, subject: str, expected_sequence: int) -> None:
        super().__init__(f"{subject}: last sequence is not {expected_sequence}")
        self.subject = subject
        self.expected_sequence = expected_sequence


class LogFullError(BusError):
    """The event stream is at its configured limit and refuses new messages."""

    code = "log_full"

    def __init__(self, subject: str) -> None:
        super().__init__(f"{subject}: the event stream is full")
        self.subject = subject
