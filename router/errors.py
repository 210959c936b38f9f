"""The one tree of exceptions.

Every error has its facts as fields, a `code` for programs, and an HTTP status: 4xx if the caller is
at fault, 5xx if this process or the fleet is. `body()` is what a caller receives, over HTTP and
over NATS alike. Outcomes of normal work (a duplicate event, a gap) are return values, not
exceptions.

The base, and errors that several rooms raise, are here; others are in the `errors` module of the
lowest room that raises them.
"""

from typing import ClassVar


class KvRouterError(Exception):
    """The base of all errors of this project.

    `retry_after_s`: the time after which a retry may succeed, or None.
    """

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    retry_after_s: float | None = None

    def body(self) -> dict[str, object]:
        """Return the error as callers receive it: `error` (a sentence), `code`, and its fields."""
        fields = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        return {"error": str(self), "code": self.code, **fields}


class InvalidFieldError(KvRouterError):
    """A field that is missing, of the wrong type, or out of range."""

    code = "invalid_field"

    def __init__(self, field: str, reason: str, allowed: str, *, status: int = 400) -> None:
        super().__init__(f"{field}: {reason} (allowed: {allowed})")
        self.field = field
        self.reason = reason
        self.allowed = allowed
        self._status = status

    @property
    def http_status(self) -> int:  # type: ignore[override]
        """The status: 422 for a wrong type or range, 400 for a missing or contradictory value."""
        return self._status


class WorkerNotFoundError(KvRouterError):
    """A worker, or a rank of it, that does not exist in this place."""

    code = "worker_not_found"
    http_status = 404

    def __init__(self, worker_id: int, detail: str = "") -> None:
        super().__init__(f"worker {worker_id} not found{detail and ' ' + detail}")
        self.worker_id = worker_id


class ConfigError(KvRouterError):
    """A setting that is unknown or malformed, or contradicts another.

    `given`: the option, variable or key under which it was given, for the sentence.
    """

    code = "config"

    def __init__(self, key: str, reason: str, allowed: str, given: str = "") -> None:
        super().__init__(f"{given or key}: {reason} (allowed: {allowed})")
        self.key = key
        self.reason = reason
        self.allowed = allowed


class WireError(KvRouterError):
    """Bytes on the bus that are not the format of their subject."""

    code = "wire"
    http_status = 400

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ServerError(KvRouterError):
    """An HTTP server that is unreachable, refuses a tool's request, or responds unreadably.

    `status`: of its response; None without one.
    """

    code = "server"

    def __init__(self, url: str, reason: str, status: int | None = None) -> None:
        super().__init__(f"{url}: {reason}")
        self.url = url
        self.reason = reason
        self.status = status
