"""Errors of reservations, and of workers that callers register."""

from router.errors import InvalidFieldError, KvRouterError
from router.protocol.values import Rank


class AnnouncedWorkerError(KvRouterError):
    """The worker is announced on the bus, and cannot be changed here."""

    code = "worker_announced"
    http_status = 409

    def __init__(self, worker_id: int) -> None:
        super().__init__(
            f"worker_id: {worker_id} is announced on the bus, and cannot be changed here "
            "(allowed: a worker that was registered here; a PATCH of lifecycle only)"
        )
        self.worker_id = worker_id


class DoubledEndpointError(KvRouterError):
    """Two ranks of a scope name the same socket, so one cache would count for both."""

    code = "doubled_endpoint"
    http_status = 409

    def __init__(self, field: str, endpoint: str, taken_by: Rank) -> None:
        super().__init__(
            f"{field}: {endpoint} is already read for worker {taken_by.worker_id} "
            f"dp_rank {taken_by.dp_rank} (allowed: a separate socket per rank)"
        )
        self.field = field
        self.endpoint = endpoint
        self.worker_id = taken_by.worker_id
        self.dp_rank = taken_by.dp_rank


class TooManyRegistrationsError(KvRouterError):
    """The configured number of registered ranks is reached."""

    code = "too_many_registrations"
    http_status = 503

    def __init__(self, limit: int) -> None:
        super().__init__(f"registrations: the limit is reached (allowed: at most {limit} ranks)")
        self.limit = limit


class MissingRequestIdError(InvalidFieldError):
    """A command that books, without an id for the reservation."""

    code = "missing_request_id"

    def __init__(self) -> None:
        super().__init__(
            "request_id",
            "missing; a reservation needs an id",
            "a non-empty string, as request_id or as header x-request-id",
        )


class TooManyReservationsError(KvRouterError):
    """A reservation beyond the configured limit."""

    code = "too_many_reservations"
    http_status = 503

    def __init__(self, limit: int) -> None:
        super().__init__(f"reservations: the limit is reached (allowed: at most {limit} live ones)")
        self.limit = limit
