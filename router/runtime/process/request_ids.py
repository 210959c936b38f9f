"""Ids of the current request, for log lines, spans and response headers.

A request may contain an id (`x-request-id`) and a trace context (`traceparent`, W3C Trace Context).
A malformed one is ignored, as the standard requires, and never shown.
"""

import re
from collections.abc import Mapping
from contextvars import ContextVar
from random import getrandbits

from msgspec import Struct

REQUEST_ID = "x-request-id"
TRACEPARENT = "traceparent"

_FIT = re.compile(r"[\x21-\x7e]{1,256}")
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_INVALID_VERSION = "ff"
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16


class TraceParent(Struct, frozen=True):
    """A span of a trace, with ids in lower-case hexadecimal; `flags`: 01 if it is sampled."""

    trace_id: str
    span_id: str
    flags: str = "00"

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"

    def child(self) -> "TraceParent":
        """Return a new span below this one."""
        return TraceParent(
            self.trace_id, (getrandbits(64) or 1).to_bytes(8, "big").hex(), self.flags
        )


def parse_traceparent(header: str) -> TraceParent | None:
    """Parse the caller's span; None if it is invalid. Later versions may append fields."""
    found = _TRACEPARENT.fullmatch(header)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == _INVALID_VERSION or (version == "00" and more is not None):
        return None
    if trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return TraceParent(trace_id, span_id, flags)


def is_fit(request_id: str) -> bool:
    """Return whether a text can be shown as a request id."""
    return _FIT.fullmatch(request_id) is not None


class RequestIds(Struct, eq=False, gc=False):
    """Ids of one request. Parsing and generation happen at first use.

    `given`, `traceparent`: as received, or None.
    """

    given: str | None = None
    traceparent: str | None = None
    _made: str | None = None
    _parent: TraceParent | None = None
    _span: TraceParent | None = None

    @property
    def request_id(self) -> str:
        """The caller's id, or a generated one."""
        if self._made is None:
            is_given = self.given is not None and is_fit(self.given)
            self._made = self.given if is_given else f"{getrandbits(64):016x}"
        assert self._made is not None
        return self._made

    @property
    def parent(self) -> TraceParent | None:
        """The caller's span, or None."""
        if self._parent is None and self.traceparent is not None:
            self._parent = parse_traceparent(self.traceparent)
            if self._parent is None:
                self.traceparent = None
        return self._parent

    @property
    def span(self) -> TraceParent | None:
        """This process's span in the caller's trace, or None without one."""
        if self._span is None:
            parent = self.parent
            if parent is not None:
                self._span = parent.child()
        return self._span

    def answered(self) -> dict[str, str]:
        """Return response headers: the caller's id, and this process's span in its trace."""
        headers = {}
        if self.given is not None and self.request_id == self.given:
            headers[REQUEST_ID] = self.given
        if self.span is not None:
            headers[TRACEPARENT] = str(self.span)
        return headers

    def lines(self) -> bytes:
        """Return `answered` as lines of an HTTP head."""
        lines = ""
        if self.given is not None and self.request_id == self.given:
            lines = f"{REQUEST_ID}: {self.given}\r\n"
        span = None if self.traceparent is None else self.span
        if span is not None:
            lines += f"{TRACEPARENT}: {span}\r\n"
        return lines.encode()


def ids_of(headers: Mapping[str, str]) -> RequestIds:
    """Return the ids in headers, which are named in lower case."""
    return RequestIds(headers.get(REQUEST_ID), headers.get(TRACEPARENT))


ANSWERED: ContextVar[RequestIds | None] = ContextVar("answered", default=None)
"""The request that the current task serves, or None."""
