"""Logging, one line per event: JSON for machines, text on a terminal.

Every line about a request contains its `request_id`, and its `trace_id` and `span_id` if the caller
sent a trace context. Credentials are redacted.
"""

import logging
import sys
from datetime import UTC, datetime
from typing import Literal, TextIO, TypeAlias

import msgspec

from router.runtime.process.redaction import redact
from router.runtime.process.request_ids import ANSWERED

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogFormat: TypeAlias = Literal["auto", "json", "text"]

_TALKATIVE = ("nats", "httpx", "httpcore")
_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


def log_to_stderr(level: LogLevel, log_format: LogFormat = "auto") -> None:
    """Log to standard error from now on. A later call replaces the settings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(log_format, sys.stderr))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    # These warn of malformed requests and forms, which callers can send at will; metrics count them
    # instead.
    for name in ("uvicorn", "python_multipart"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _formatter(log_format: LogFormat, stream: TextIO) -> logging.Formatter:
    is_text = stream.isatty() if log_format == "auto" else log_format == "text"
    return TextLines() if is_text else JsonLines()


class JsonLines(logging.Formatter):
    """A formatter that writes one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(record.getMessage()),
            **_ids(),
        }
        if record.exc_info:
            fields["exception"] = redact(self.formatException(record.exc_info))
        return msgspec.json.encode(fields).decode()


class TextLines(logging.Formatter):
    """A formatter of time, level, module, message and ids; tracebacks follow on separate lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line. Control characters, which callers may have sent, are escaped."""
        time = self.formatTime(record)
        message = printable(record.getMessage())
        ids = "".join(f" {name}={value}" for name, value in _ids().items())
        line = f"{time} {record.levelname:<7} {record.name}: {message}{ids}"
        if record.exc_info:
            line += f"\n{redact(self.formatException(record.exc_info))}"
        return line


def printable(text: str) -> str:
    """Return a line for a terminal, without secrets and control characters."""
    return redact(text).translate(_ESCAPED)


def _ids() -> dict[str, str]:
    answered = ANSWERED.get()
    if answered is None:
        return {}
    span = answered.span
    trace = {} if span is None else {"trace_id": span.trace_id, "span_id": span.span_id}
    return {"request_id": answered.request_id, **trace}
