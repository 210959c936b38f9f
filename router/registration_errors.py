"""What is refused of workers that callers register; part of the tree in `errors`.

KvRouterError
├── AnnouncedWorkerError         the worker comes and goes with its announcement on the bus
├── DoubledEndpointError         two ranks would be heard on one socket
├── TooManyRegistrationsError    the configured number of ranks is reached
└── DataDirError                 what is kept for a restart can not be used, or written
"""

from router.errors import KvRouterError
from router.protocol.values import Rank


class AnnouncedWorkerError(KvRouterError):
    """The worker comes and goes with its announcement on the bus, which is not ours to change."""

    code = "worker_announced"
    http_status = 409

    def __init__(self, worker_id: int) -> None:
        super().__init__(
            f"worker_id: {worker_id} is announced on the bus, and comes and goes with that "
            "(allowed: a worker that was registered here; a PATCH of nothing but lifecycle)"
        )
        self.worker_id = worker_id


class DoubledEndpointError(KvRouterError):
    """Two ranks of a scope would be heard on one socket: one cache would count for both."""

    code = "doubled_endpoint"
    http_status = 409

    def __init__(self, field: str, endpoint: str, taken_by: Rank) -> None:
        super().__init__(
            f"{field}: {endpoint} is already read for worker {taken_by.worker_id} "
            f"dp_rank {taken_by.dp_rank} (allowed: a socket of its own for each rank)"
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


class DataDirError(KvRouterError):
    """A file of what is kept for a restart can not be used, or written."""

    code = "data_dir"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason
