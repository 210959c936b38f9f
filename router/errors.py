"""The one tree of exceptions.

Every error carries the facts as fields, a `code` for programs, and the HTTP status that says whose
fault it is (4xx the caller's, 5xx ours or the fleet's). `body()` is what a caller sees, over HTTP
and over NATS alike. Outcomes that belong to normal work (a duplicate event, a gap) are return
values, not exceptions.

    KvRouterError
    ├── InvalidFieldError            a field is missing, malformed or out of range
    │   └── MissingRequestIdError
    ├── DuplicateReservationError, ReservationNotFoundError, TooManyReservationsError
    ├── DeadlineExceededError        the caller does not wait any longer
    ├── SelectionNotFoundError       nothing pending to be reserved under this id
    ├── WorkerNotFoundError
    ├── IndexDisabledError           the configuration says to keep no index
    ├── ShadowOffError               the configuration says to decide, not to compare
    ├── NoReplicaPeersError          routers find each other, nobody names them
    ├── ConfigError                  a setting, at start
    ├── WireError                    undecodable bytes on the bus
    ├── ServerError                  an HTTP server that a tool asked
    └── …                            one module per subject: `body_errors`, `placement_errors`,
                                     `queue_errors`, `registration_errors`, `index_errors`,
                                     `bus_errors`, `block_errors`, `blockset_errors`,
                                     `slot_errors`, and the `errors` module of a package
"""

from typing import ClassVar


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


class WorkerNotFoundError(KvRouterError):
    """No such worker, or no such rank of it, in the place asked about."""

    code = "worker_not_found"
    http_status = 404

    def __init__(self, worker_id: int, detail: str = "") -> None:
        super().__init__(f"worker {worker_id} not found{detail and ' ' + detail}")
        self.worker_id = worker_id


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
