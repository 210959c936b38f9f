"""What a client can ask: how each is called over HTTP and over NATS, and what is answered."""

from functools import cache
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from msgspec import Struct, structs

from router.protocol.batches import BatchReply
from router.protocol.replies import (
    Decision,
    OverlapScoresReply,
    PotentialLoad,
    PotentialLoadsReply,
    ReservationReply,
    ScopeLoads,
)
from router.protocol.requests import Usage

T = TypeVar("T")


class Call(Struct, Generic[T], frozen=True, eq=False):
    """`name`: on NATS, with `bus_reply` where that differs from HTTP's reply; `path` may have a
    `{request_id}`. `is_repeatable`: doing it twice is as good as once. `books`: the same, if what
    the first time may have booked is freed before. `takes_binary`: HTTP reads tokens as bytes.
    """

    name: str
    method: str
    path: str
    reply: Any
    bus_reply: Any = None
    is_repeatable: bool = True
    books: bool = False
    takes_binary: bool = False


class Done(Struct, frozen=True):
    """Nothing more is to be said."""

    status: str


_ID = "{request_id}"
_RESERVATION = f"/reservations/{_ID}"

SELECT = Call[Decision]("select", "POST", "/select", Decision, takes_binary=True)
SELECT_AND_RESERVE = Call[Decision](
    "select_and_reserve", "POST", "/select_and_reserve", Decision, books=True, takes_binary=True
)
RESERVE = Call[ReservationReply](
    "reserve", "POST", "/reservations", ReservationReply, books=True, takes_binary=True
)
PREFILL_COMPLETE = Call[Done]("prefill_complete", "POST", f"{_RESERVATION}/prefill_complete", Done)
OUTPUT_BLOCK = Call[Done](
    "output_block", "POST", f"{_RESERVATION}/output_block", Done, is_repeatable=False
)
FREE = Call[Done]("free", "DELETE", _RESERVATION, Done)
LOADS = Call[list[ScopeLoads]]("loads", "GET", "/loads", list[ScopeLoads])
POTENTIAL_LOADS = Call[list[PotentialLoad] | PotentialLoadsReply](
    "potential_loads",
    "POST",
    "/potential_loads",
    list[PotentialLoad],
    PotentialLoadsReply,
)
OVERLAP_SCORES = Call[OverlapScoresReply](
    "overlap_scores", "POST", "/overlap_scores", OverlapScoresReply
)


SELECT_BATCH = Call[BatchReply]("select:batch", "POST", "/select:batch", BatchReply)
REPORT = Call[BatchReply](
    "reservations:batch", "POST", "/reservations:batch", BatchReply, is_repeatable=False
)


class Question(Struct, Generic[T], frozen=True, eq=False):
    """A call, and its fields; `request_id`: of the reservation that it is about, if it is."""

    call: Call[T]
    fields: dict[str, Any] = {}
    request_id: str | None = None

    @property
    def header_id(self) -> str | None:
        """The id, if a header can say it."""
        request_id = self.request_id
        is_fit = request_id is not None and request_id.isascii() and request_id.isprintable()
        return request_id if is_fit else None

    @property
    def path(self) -> str:
        """Over HTTP. Raises nothing: ids are quoted."""
        path = self.call.path
        if _ID not in path:
            return path
        return path.replace(_ID, quote(self.request_id or "", safe=""))


def usage_fields(usage: Usage | None) -> dict[str, Any]:
    """Of a question that may say what an engine said."""
    return {} if usage is None else {"usage": said(usage)}


def said(request: Struct) -> dict[str, Any]:
    """The fields of a request that say something."""
    fields = {}
    for name, encode_name, default in _sayable(type(request)):
        value = getattr(request, name)
        # Arrays, which compare otherwise, have None for their default.
        if value is not None and (default is None or value != default):
            fields[encode_name] = value
    return fields


@cache
def _sayable(request_type: type[Struct]) -> tuple[tuple[str, str, Any], ...]:
    """Names of fields, here and on the wire, and what they are unless said."""
    fields = structs.fields(request_type)
    return tuple((each.name, each.encode_name, each.default) for each in fields)
