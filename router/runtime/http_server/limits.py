"""Limits of an HTTP server that apply before request bodies, and the errors beyond them."""

from msgspec import Struct

from router.errors import KvRouterError
from router.runtime.http_server.config import HttpServerConfig
from router.runtime.security.config import SecurityConfig, is_for_itself


class HttpLimits(Struct, frozen=True):
    """Limits of connections and request heads.

    `stuck_s`: a client that reads none of its response for this time is disconnected.
    `local_names_only`: a request with the host name of another site is refused.
    """

    max_connections: int = 4096
    header_limit_bytes: int = 32 * 1024
    max_headers: int = 100
    header_timeout_s: float = 10.0
    keep_alive_s: float = 75.0
    stuck_s: float = 60.0
    local_names_only: bool = False

    @classmethod
    def of(
        cls, http: HttpServerConfig, security: SecurityConfig, max_connections: int
    ) -> "HttpLimits":
        """Return the limits of a configuration."""
        return cls(
            max_connections,
            http.header_limit_bytes,
            http.max_headers,
            http.header_timeout_s,
            http.keep_alive_s,
            local_names_only=is_for_itself(security),
        )


class MalformedRequestError(KvRouterError):
    """The request is not HTTP, or is ambiguous, so that two parsers could differ about it.

    HTTP/1.1 requires one Host header (RFC 9112, 3.2).
    """

    code = "malformed_request"
    http_status = 400

    def __init__(self) -> None:
        super().__init__("request: not HTTP/1.1, or ambiguous (allowed: RFC 9112)")


class MisdirectedRequestError(KvRouterError):
    """The Host header names another site: a browser was directed here by DNS rebinding."""

    code = "misdirected_request"
    http_status = 421

    def __init__(self) -> None:
        allowed = "localhost, an address; token_file or insecure_public_bind allow any"
        super().__init__(f"host: another site's name (allowed: {allowed})")


class HeadersTooLargeError(KvRouterError):
    """Request line and headers exceed a limit."""

    code = "headers_too_large"
    http_status = 431

    def __init__(self, limits: HttpLimits) -> None:
        size_bytes, count = limits.header_limit_bytes, limits.max_headers
        super().__init__(f"headers: too large (allowed: {size_bytes} bytes, {count} headers)")


class HeaderTimeoutError(KvRouterError):
    """Request line and headers did not arrive in time."""

    code = "header_timeout"
    http_status = 408

    def __init__(self, limits: HttpLimits) -> None:
        super().__init__(f"headers: not received in time (allowed: {limits.header_timeout_s} s)")


class TooManyConnectionsError(KvRouterError):
    """The limit of open connections is reached."""

    code = "too_many_connections"
    http_status = 503
    retry_after_s = 1.0

    def __init__(self, limits: HttpLimits) -> None:
        super().__init__(f"connections: too many (allowed: {limits.max_connections})")
