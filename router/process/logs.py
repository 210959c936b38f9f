"""What a process logs, a line an event: JSON for machines, text on a terminal.

Every line of a request's has its `request_id`, and its `trace_id` and `span_id` where the caller
said a trace. No line shows credentials.
"""

import logging
import sys
from datetime import UTC, datetime
from typing import Literal, TextIO, TypeAlias

import msgspec

from router.masking import masked
from router.process.request_ids import ANSWERED

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogFormat: TypeAlias = Literal["auto", "json", "text"]

_TALKATIVE = ("nats", "httpx", "httpcore")
_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


def log_to_stderr(level: LogLevel, log_format: LogFormat = "auto") -> None:
    """Log to the standard error output from now on; called again, with other settings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(log_format, sys.stderr))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    # It warns of malformed requests, which callers send as often as they like: those are counted.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)


def _formatter(log_format: LogFormat, stream: TextIO) -> logging.Formatter:
    is_text = stream.isatty() if log_format == "auto" else log_format == "text"
    return TextLines() if is_text else JsonLines()


class JsonLines(logging.Formatter):
    """A JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": masked(record.getMessage()),
            **_ids(),
        }
        if record.exc_info:
            fields["exception"] = masked(self.formatException(record.exc_info))
        return msgspec.json.encode(fields).decode()


class TextLines(logging.Formatter):
    """Time, level, module, message, ids; a traceback follows in lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """The line. Control characters, which others may have sent, are spelled out."""
        time = self.formatTime(record)
        message = masked(record.getMessage()).translate(_ESCAPED)
        ids = "".join(f" {name}={value}" for name, value in _ids().items())
        line = f"{time} {record.levelname:<7} {record.name}: {message}{ids}"
        if record.exc_info:
            line += f"\n{masked(self.formatException(record.exc_info))}"
        return line


def _ids() -> dict[str, str]:
    answered = ANSWERED.get()
    if answered is None:
        return {}
    span = answered.span
    trace = {} if span is None else {"trace_id": span.trace_id, "span_id": span.span_id}
    return {"request_id": answered.request_id, **trace}
