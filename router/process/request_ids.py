"""Which request is being answered: the ids by which log lines, spans and answers speak of it.

A request may bring an id (`x-request-id`) and a place in a trace (`traceparent`, W3C Trace
Context). What is malformed is ignored, as that standard says, and never shown.
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
    """A span of a trace, ids in lower-case hexadecimal; `flags`: 01 where it is sampled."""

    trace_id: str
    span_id: str
    flags: str = "00"

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"

    def child(self) -> "TraceParent":
        """A span under this one."""
        return TraceParent(self.trace_id, f"{getrandbits(64) or 1:016x}", self.flags)


def parse_traceparent(header: str) -> TraceParent | None:
    """The caller's span; None if this is none. Later versions may say more behind it."""
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
    """Whether this may be shown as the id of a request."""
    return _FIT.fullmatch(request_id) is not None


class RequestIds:
    """Ids of one request. Whatever costs time is done when somebody asks for it first."""

    __slots__ = ("_given", "_made", "_parent", "_span", "_traceparent")

    def __init__(self, request_id: str | None = None, traceparent: str | None = None) -> None:
        self._given = request_id
        self._made: str | None = None
        self._traceparent = traceparent
        self._parent: TraceParent | None = None
        self._span: TraceParent | None = None

    @property
    def request_id(self) -> str:
        """The caller's, or one made here."""
        if self._made is None:
            is_given = self._given is not None and is_fit(self._given)
            self._made = self._given if is_given else f"{getrandbits(64):016x}"
        assert self._made is not None
        return self._made

    @property
    def parent(self) -> TraceParent | None:
        """The caller's span, if it said one."""
        if self._traceparent is not None:
            self._parent, self._traceparent = parse_traceparent(self._traceparent), None
        return self._parent

    @property
    def span(self) -> TraceParent | None:
        """Our span in the caller's trace, if it said one."""
        if self._traceparent is None and self._parent is None:
            return None
        if self._span is None and self.parent is not None:
            self._span = self.parent.child()
        return self._span

    def answered(self) -> dict[str, str]:
        """Headers of an answer: what the caller sent, with our own span in its trace."""
        headers = {}
        if self._given is not None and self.request_id == self._given:
            headers[REQUEST_ID] = self._given
        if self.span is not None:
            headers[TRACEPARENT] = str(self.span)
        return headers


def ids_of(headers: Mapping[str, str]) -> RequestIds:
    """The ids that headers, named in lower case, say."""
    return RequestIds(headers.get(REQUEST_ID), headers.get(TRACEPARENT))


ANSWERED: ContextVar[RequestIds | None] = ContextVar("answered", default=None)
"""The request that this task answers, if it does."""
