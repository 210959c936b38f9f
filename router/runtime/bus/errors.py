"""Errors of the event bus; part of the tree in `errors`.

KvRouterError
├── TwinError                    another live process has this id
└── BusError
    ├── BusUnavailableError      not connected, or no response in time
    ├── LogConflictError         another process wrote to our subject, or the store was lost
    └── LogFullError             the stream is at its configured limit
"""

from router.errors import KvRouterError


class TwinError(KvRouterError):
    """Another live process that announces itself under the same id."""

    code = "twin"
    http_status = 409

    def __init__(self, key: str, detail: str) -> None:
        super().__init__(f"{key} is taken: {detail}")
        self.key = key
        self.detail = detail


class BusError(KvRouterError):
    """An error between this process and the event bus."""

    code = "bus"
    http_status = 503


class BusUnavailableError(BusError):
    """A bus that did not respond in time, or to which there is no connection."""

    code = "bus_unavailable"

    def __init__(self, reason: str) -> None:
        super().__init__(f"event bus unavailable: {reason}")
        self.reason = reason


class LogConflictError(BusError):
    """An unexpected last sequence of a subject: a twin wrote to it, or the store was lost."""

    code = "log_conflict"

    def __init__(self, subject: str, expected_sequence: int) -> None:
        super().__init__(f"{subject}: last sequence is not {expected_sequence}")
        self.subject = subject
        self.expected_sequence = expected_sequence


class LogFullError(BusError):
    """An event stream that is at its configured limit and refuses new messages."""

    code = "log_full"

    def __init__(self, subject: str) -> None:
        super().__init__(f"{subject}: the event stream is full")
        self.subject = subject
