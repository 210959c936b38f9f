"""Settings of every process that serves and logs."""

from typing import Annotated

from msgspec import Meta

from router.process.logs import LogFormat, LogLevel
from router.security.config import SecurityConfig


class ProcessConfig(SecurityConfig, frozen=True, kw_only=True):
    """What every process that listens can be told of how it logs."""

    log_level: Annotated[LogLevel, Meta(description="debug, info, warning or error")] = "info"
    log_format: Annotated[
        LogFormat, Meta(description="json, text, or auto: text on a terminal")
    ] = "auto"
