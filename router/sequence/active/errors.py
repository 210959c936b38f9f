"""Errors of booked requests."""

from router.errors import KvRouterError


class DuplicateReservationError(KvRouterError):
    """An id that is booked already, on this rank, or waits."""

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
    """An id without a live reservation."""

    code = "reservation_not_found"
    http_status = 404

    def __init__(self, request_id: str) -> None:
        super().__init__(f"reservation {request_id} not found (freed, expired or never made)")
        self.request_id = request_id
