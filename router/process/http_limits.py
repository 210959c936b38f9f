"""What a server takes of its callers before their bodies, and what it says beyond."""

from msgspec import Struct

from router.errors import KvRouterError
from router.security.config import SecurityConfig, is_for_itself


class HttpLimits(Struct, frozen=True):
    """What a server takes of its callers. Who does not take for `stuck_s` what it is sent is hung
    up on. `local_names_only`: who asks for another's site is refused.
    """

    max_connections: int = 4096
    header_limit_bytes: int = 32 * 1024
    max_headers: int = 100
    header_timeout_s: float = 10.0
    keep_alive_s: float = 75.0
    stuck_s: float = 60.0
    local_names_only: bool = False

    @classmethod
    def of(cls, config: SecurityConfig, max_connections: int) -> "HttpLimits":
        """Of connections, and of what comes before a body."""
        return cls(
            max_connections,
            config.header_limit_bytes,
            config.max_headers,
            config.header_timeout_s,
            config.keep_alive_s,
            local_names_only=is_for_itself(config),
        )


class MalformedRequestError(KvRouterError):
    """Not HTTP, or HTTP of which two readers could think differently."""

    code = "malformed_request"
    http_status = 400

    def __init__(self) -> None:
        super().__init__("request: not HTTP/1.1, or ambiguous (allowed: RFC 9112)")


class MisdirectedRequestError(KvRouterError):
    """Somebody else's site is asked for, by a browser that was told that we are it."""

    code = "misdirected_request"
    http_status = 421

    def __init__(self) -> None:
        allowed = "localhost, an address; token_file or insecure_public_bind allow any"
        super().__init__(f"host: another site's name (allowed: {allowed})")


class HeadersTooLargeError(KvRouterError):
    """Request line and headers are more than is read."""

    code = "headers_too_large"
    http_status = 431

    def __init__(self, limits: HttpLimits) -> None:
        size_bytes, count = limits.header_limit_bytes, limits.max_headers
        super().__init__(f"headers: too large (allowed: {size_bytes} bytes, {count} headers)")


class HeaderTimeoutError(KvRouterError):
    """Request line and headers did not come in time."""

    code = "header_timeout"
    http_status = 408

    def __init__(self, limits: HttpLimits) -> None:
        super().__init__(f"headers: not received in time (allowed: {limits.header_timeout_s} s)")


class TooManyConnectionsError(KvRouterError):
    """As many connections are open as may be."""

    code = "too_many_connections"
    http_status = 503
    retry_after_s = 1.0

    def __init__(self, limits: HttpLimits) -> None:
        super().__init__(f"connections: too many (allowed: {limits.max_connections})")
