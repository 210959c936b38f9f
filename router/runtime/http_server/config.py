"""Settings of every process that serves and logs."""

from typing import Annotated, ClassVar

from msgspec import Struct

from router.runtime.process.logs import LogFormat, LogLevel
from router.runtime.process.settings import COMMON, LIVE, about


class HttpServerConfig(Struct, frozen=True, kw_only=True):
    """Port of an HTTP server, and limits of its request heads."""

    GROUP: ClassVar[str] = "listening"

    http_port: Annotated[
        int, about("port to listen on; 0 takes a free one", COMMON, ge=0, le=65535)
    ] = 0
    header_limit_bytes: Annotated[
        int, about("size of request line and headers; beyond that, 431", ge=1024, le=1 << 20)
    ] = 32 * 1024
    max_headers: Annotated[
        int,
        about("number of headers of a request; beyond that, 431", ge=8, le=10_000, unit="HEADERS"),
    ] = 100
    header_timeout_s: Annotated[
        float, about("time to receive the headers; beyond that, 408 and closed", gt=0)
    ] = 10.0
    keep_alive_s: Annotated[
        float,
        about(
            "an idle connection is closed after this time; set it above the idle "
            "timeout of callers, or they may lose a request",
            gt=0,
        ),
    ] = 75.0
    max_requests: Annotated[
        int, about("requests in flight, including those in the queue; beyond that, 503", LIVE, ge=1)
    ] = 4096


class BodyConfig(Struct, frozen=True, kw_only=True):
    """Limits of request bodies."""

    GROUP: ClassVar[str] = "listening"

    body_limit_bytes: Annotated[
        int, about("size of a request body; beyond that, 413", LIVE, ge=1024)
    ] = 32 * 1024 * 1024
    body_timeout_s: Annotated[
        float, about("time to receive a body; beyond that, 408", LIVE, gt=0)
    ] = 30.0


class LogConfig(Struct, frozen=True, kw_only=True):
    """Logging settings."""

    GROUP: ClassVar[str] = "logs and traces"

    log_level: Annotated[
        LogLevel, about("least level of messages that are logged", COMMON | LIVE)
    ] = "info"
    log_format: Annotated[LogFormat, about("auto: text on a terminal, else json", LIVE)] = "auto"
