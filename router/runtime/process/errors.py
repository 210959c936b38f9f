"""Errors of a request's body and its transmission; part of the tree in `errors`."""

from collections.abc import Sequence

from router.errors import KvRouterError


class MalformedBodyError(KvRouterError):
    """A body that is not the encoding it claims to be."""

    code = "malformed_body"
    http_status = 400

    def __init__(self, reason: str, allowed: str = "valid JSON in UTF-8") -> None:
        super().__init__(f"body: {reason} (allowed: {allowed})")
        self.reason = reason


class UnsupportedMediaTypeError(KvRouterError):
    """A content type that this route does not read."""

    code = "unsupported_media_type"
    http_status = 415

    def __init__(
        self, content_type: str | None, allowed: Sequence[str] = ("application/json",)
    ) -> None:
        super().__init__(f"content-type: {content_type!r} (allowed: {', '.join(allowed)})")
        self.content_type = content_type


class BodyTooLargeError(KvRouterError):
    """A body that exceeds the configured limit."""

    code = "body_too_large"
    http_status = 413

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"body: larger than the limit (allowed: at most {limit_bytes} bytes)")
        self.limit_bytes = limit_bytes


class BodyTimeoutError(KvRouterError):
    """A body that did not arrive in time."""

    code = "body_timeout"
    http_status = 408

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"body: not received in time (allowed: at most {limit_s} s)")
        self.limit_s = limit_s


class ClientGoneError(KvRouterError):
    """A caller that disconnected before its body was complete; the response cannot be sent."""

    code = "client_gone"
    http_status = 499

    def __init__(self) -> None:
        super().__init__("body: the caller disconnected")
