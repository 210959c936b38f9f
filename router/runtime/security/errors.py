"""Errors for unauthenticated, forbidden and too frequent requests.

They are part of the tree in `router/errors.py`. Credentials that a caller presented are never part
of an error.
"""

from router.errors import KvRouterError


class UnauthenticatedError(KvRouterError):
    """The caller is unknown: no token, an unknown token, or an expired one."""

    code = "unauthenticated"
    http_status = 401

    def __init__(self, reason: str) -> None:
        super().__init__(f"authorization: {reason} (allowed: Bearer and a token of this router)")
        self.reason = reason


class ForbiddenError(KvRouterError):
    """The caller is known but lacks the permission."""

    code = "forbidden"
    http_status = 403

    def __init__(self, field: str, reason: str, allowed: str) -> None:
        super().__init__(f"{field}: {reason} (allowed: {allowed})")
        self.field = field
        self.reason = reason
        self.allowed = allowed


class RateLimitedError(KvRouterError):
    """The caller or its tenant exceeds its rate. `limit`: requests per second."""

    code = "rate_limited"
    http_status = 429

    def __init__(self, who: str, limit: float, retry_after_s: float) -> None:
        super().__init__(f"{who}: too many requests (allowed: {limit:g} per second)")
        self.limit = limit
        self.retry_after_s = retry_after_s


class TooManyRequestsError(KvRouterError):
    """The limit of requests in flight, of all callers together, is reached."""

    code = "too_many_requests"
    http_status = 503
    retry_after_s = 1.0

    def __init__(self, limit: int) -> None:
        super().__init__(f"requests: the limit is reached (allowed: at most {limit} in flight)")
        self.limit = limit


class CrossSiteError(KvRouterError):
    """A page of another site has sent a request that changes something."""

    code = "cross_site"
    http_status = 403

    def __init__(self, header: str, value: str) -> None:
        allowed = "same-origin, none" if header == "sec-fetch-site" else "this server's, or none"
        super().__init__(f"{header}: {value!r} is a page of another site (allowed: {allowed})")
        self.header = header


class ContentEncodingError(KvRouterError):
    """The body is compressed: its decoded size is not bounded by the received size."""

    code = "unsupported_content_encoding"
    http_status = 415

    def __init__(self, encoding: str) -> None:
        super().__init__(f"content-encoding: {encoding!r} (allowed: identity)")
        self.encoding = encoding
