"""A trace of requests that cannot be read; part of the tree in `router.errors`."""

from router.errors import KvRouterError


class TraceError(KvRouterError):
    """A line of a trace of requests is malformed, or contradicts the lines above it."""

    code = "trace"

    def __init__(self, line: int, field: str, reason: str, allowed: str) -> None:
        super().__init__(f"line {line}: {field}: {reason} (allowed: {allowed})")
        self.line = line
        self.field = field
        self.reason = reason
        self.allowed = allowed
