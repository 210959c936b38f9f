"""Refusals of whom we do not know, who may not, or who asks too much. Part of the tree in
`router/errors.py`. What a caller presented is never part of an error.
"""

from router.errors import KvRouterError


class UnauthenticatedError(KvRouterError):
    """Nobody we know: no token, an unknown one, or one that has expired."""

    code = "unauthenticated"
    http_status = 401

    def __init__(self, reason: str) -> None:
        super().__init__(f"authorization: {reason} (allowed: Bearer and a token of this router)")
        self.reason = reason


class ForbiddenError(KvRouterError):
    """The caller is known, and may not do this."""

    code = "forbidden"
    http_status = 403

    def __init__(self, field: str, reason: str, allowed: str) -> None:
        super().__init__(f"{field}: {reason} (allowed: {allowed})")
        self.field = field
        self.reason = reason
        self.allowed = allowed


class RateLimitedError(KvRouterError):
    """The caller, or its tenant, asks more often than it may. `limit`: requests per second."""

    code = "rate_limited"
    http_status = 429

    def __init__(self, who: str, limit: float, retry_after_s: float) -> None:
        super().__init__(f"{who}: too many requests (allowed: {limit:g} per second)")
        self.limit = limit
        self.retry_after_s = retry_after_s


class TooManyRequestsError(KvRouterError):
    """As many requests are in flight as may be, of everybody together."""

    code = "too_many_requests"
    http_status = 503
    retry_after_s = 1.0

    def __init__(self, limit: int) -> None:
        super().__init__(f"requests: the limit is reached (allowed: at most {limit} in flight)")
        self.limit = limit


class ContentEncodingError(KvRouterError):
    """The body is compressed: what it becomes is not bounded by what was sent."""

    code = "unsupported_content_encoding"
    http_status = 415

    def __init__(self, encoding: str) -> None:
        super().__init__(f"content-encoding: {encoding!r} (allowed: identity)")
        self.encoding = encoding
