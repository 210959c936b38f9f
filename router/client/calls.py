"""The endpoints of the router: their names over HTTP and NATS, and their replies."""

from collections.abc import Callable
from functools import cache
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from msgspec import Struct, structs

from router.protocol.batches import BatchReply
from router.protocol.capacity import PoolCapacity
from router.protocol.replies import (
    Decision,
    LoadForecast,
    OverlapScoresReply,
    PotentialLoad,
    PotentialLoadsReply,
    ReservationReply,
    ScopeLoads,
)

T = TypeVar("T")


class Endpoint(Struct, Generic[T], frozen=True, eq=False):
    """An endpoint of the router.

    `name`: its name on NATS, with `bus_reply` if the reply differs from HTTP's; `path` may contain
    a `{request_id}`. `joined`: makes the reply of an HTTP body without room for warnings, and of
    these. `is_repeatable`: executing it twice is harmless. `books`: the same, if the first
    attempt's booking is freed before. `takes_binary`: HTTP accepts tokens as bytes.
    """

    name: str
    method: str
    path: str
    reply: Any
    bus_reply: Any = None
    joined: Callable[[Any, tuple[str, ...]], T] | None = None
    is_repeatable: bool = True
    books: bool = False
    takes_binary: bool = False


class Done(Struct, frozen=True):
    """A reply without content."""

    status: str


_ID = "{request_id}"
_RESERVATION = f"/reservations/{_ID}"

SELECT = Endpoint[Decision]("select", "POST", "/select", Decision, takes_binary=True)
SELECT_AND_RESERVE = Endpoint[Decision](
    "select_and_reserve", "POST", "/select_and_reserve", Decision, books=True, takes_binary=True
)
RESERVE = Endpoint[ReservationReply](
    "reserve", "POST", "/reservations", ReservationReply, books=True, takes_binary=True
)
PREFILL_COMPLETE = Endpoint[Done](
    "prefill_complete", "POST", f"{_RESERVATION}/prefill_complete", Done
)
OUTPUT_BLOCK = Endpoint[Done](
    "output_block", "POST", f"{_RESERVATION}/output_block", Done, is_repeatable=False
)
FREE = Endpoint[Done]("free", "DELETE", _RESERVATION, Done)
LOADS = Endpoint[list[ScopeLoads]]("loads", "GET", "/loads", list[ScopeLoads])
CAPACITY = Endpoint[list[PoolCapacity]]("capacity", "GET", "/capacity", list[PoolCapacity])
POTENTIAL_LOADS = Endpoint[LoadForecast | PotentialLoadsReply](
    "potential_loads",
    "POST",
    "/potential_loads",
    list[PotentialLoad],
    PotentialLoadsReply,
    LoadForecast,
)
OVERLAP_SCORES = Endpoint[OverlapScoresReply](
    "overlap_scores", "POST", "/overlap_scores", OverlapScoresReply
)


SELECT_BATCH = Endpoint[BatchReply]("select:batch", "POST", "/select:batch", BatchReply)
REPORT = Endpoint[BatchReply](
    "reservations:batch", "POST", "/reservations:batch", BatchReply, is_repeatable=False
)


class Question(Struct, Generic[T], frozen=True, eq=False):
    """A call with its content: a request, or fields by name.

    `request_id`: the id of its reservation, if it has one.
    """

    call: Endpoint[T]
    content: Any = {}
    request_id: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the content that differ from their defaults."""
        content: Any = self.content
        return content if isinstance(content, dict) else received_fields(content)

    @property
    def header_id(self) -> str | None:
        """The id, if a header can carry it."""
        request_id = self.request_id
        is_fit = request_id is not None and request_id.isascii() and request_id.isprintable()
        return request_id if is_fit else None

    @property
    def path(self) -> str:
        """The path over HTTP. Ids are quoted."""
        path = self.call.path
        if _ID not in path:
            return path
        return path.replace(_ID, quote(self.request_id or "", safe=""))


def received_fields(request: Struct) -> dict[str, Any]:
    """Return the fields of a request that differ from their defaults."""
    fields = {}
    for name, encode_name, default in _wire_fields(type(request)):
        value = getattr(request, name)
        # Fields with array values, which cannot be compared by `!=`, have None as their default.
        if value is not None and (default is None or value != default):
            fields[encode_name] = value
    return fields


@cache
def _wire_fields(request_type: type[Struct]) -> tuple[tuple[str, str, Any], ...]:
    """Return the fields of a type: their names, their names on the wire, and their defaults."""
    fields = structs.fields(request_type)
    return tuple((each.name, each.encode_name, each.default) for each in fields)
