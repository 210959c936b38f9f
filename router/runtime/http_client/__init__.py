"""An HTTP/1.1 client with persistent connections, optimised for forwarding."""

from router.runtime.http_client.connection import NeverSentError, UpstreamError, UpstreamResponse
from router.runtime.http_client.pool import HttpPool, Origin, PoolLimits, Request

__all__ = [
    "HttpPool",
    "NeverSentError",
    "Origin",
    "PoolLimits",
    "Request",
    "UpstreamError",
    "UpstreamResponse",
]
