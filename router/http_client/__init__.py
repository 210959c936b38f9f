"""HTTP/1.1 to other servers, on connections that are kept: what forwarding costs is mostly this."""

from router.http_client.connection import Answer
from router.http_client.errors import NeverSentError, UpstreamError
from router.http_client.pool import HttpPool, PoolLimits
from router.http_client.requests import Origin, Request

__all__ = [
    "Answer",
    "HttpPool",
    "NeverSentError",
    "Origin",
    "PoolLimits",
    "Request",
    "UpstreamError",
]
