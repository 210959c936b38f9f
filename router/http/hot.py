"""Routes that every request of a fleet goes through: the front answers them itself.

A handler gives its answer at once wherever nothing has to be waited for: no task, no thread, no
lock. Long bodies are decoded on another thread.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from router.batches import BatchCommands
from router.commands import Commands
from router.http.answers import OK, Answer, answer
from router.http.exchange import JSON, Exchange, Head
from router.http.header_mode import decision_answer
from router.http.plain_selects import PlainSelects
from router.http.token_requests import TokenRequests
from router.process.bodies import THREAD_BYTES, JsonReader
from router.protocol.batches import ReservationBatch
from router.protocol.replies import Decision
from router.protocol.requests import (
    BookRequest,
    FreeRequest,
    OutputBlockRequest,
    PrefillCompleteRequest,
    SelectRequest,
    Usage,
)
from router.request_headers import (
    MAX_ID_CHARACTERS,
    REQUEST_ID_HEADER,
    SELECT_HEADERS,
    asked_with,
    identified,
    request_id_of,
)
from router.security.guard import Guard
from router.tenant_commands import commands_of

Later: TypeAlias = Coroutine[Any, Any, Answer]
Handler: TypeAlias = Callable[[Exchange], Answer | Later]
T = TypeVar("T")
U = TypeVar("U", PrefillCompleteRequest, FreeRequest)

_SELECT_HEADERS = {name.encode(): name for name in SELECT_HEADERS.values()}
_ID_HEADER = REQUEST_ID_HEADER.encode()
_ASKING_HEADERS = _SELECT_HEADERS.keys() - {_ID_HEADER}


class HotRoute(Struct, frozen=True):
    """A route, as it is counted, and who answers it; `request_id`: of the path asked for.

    `plain`: who answers the plainest of requests, under this id, below whatever looks at callers
    and heads; None goes to the handler. It has changed nothing then, and raises nothing.
    """

    path: str
    handler: Handler
    request_id: str = ""
    plain: Callable[[Head, str | None, bytes], Answer | None] | None = None


class HotRoutes:
    """The routes, and their handlers on one set of commands."""

    def __init__(self, commands: Commands, guard: Guard) -> None:
        self._commands = commands
        self._batches = BatchCommands(commands, guard, msgspec.json.Decoder)
        self._batch_bodies = JsonReader(ReservationBatch)
        self._select_requests = TokenRequests(SelectRequest)
        self._plain_selects = PlainSelects(self._select_requests)
        self._reserve_requests = TokenRequests(BookRequest)
        self._prefill_complete_bodies = _optional(PrefillCompleteRequest)
        self._free_bodies = _optional(FreeRequest)
        self._output_block_bodies = JsonReader(OutputBlockRequest)
        self._whole: dict[tuple[str, str], HotRoute] = {
            ("POST", route.path): route
            for route in (
                HotRoute("/select", self._select, plain=self._select_plain),
                HotRoute("/select_and_reserve", self._select_and_reserve),
                HotRoute("/reservations", self._reserve),
                HotRoute("/reservations:batch", self._batch),
            )
        }
        progress = "/reservations/{request_id}"
        self._of_reservation: dict[tuple[str, str], tuple[str, Handler]] = {
            ("POST", "prefill_complete"): (f"{progress}/prefill_complete", self._prefill_complete),
            ("POST", "output_block"): (f"{progress}/output_block", self._output_block),
            ("DELETE", ""): (progress, self._free),
        }

    def find(self, method: str, path: str) -> HotRoute | None:
        """The route that answers this; None: none of these."""
        found = self._whole.get((method, path))
        if found is not None or not path.startswith("/reservations/"):
            return found
        request_id, slash, step = path.removeprefix("/reservations/").partition("/")
        route = self._of_reservation.get((method, step))
        if route is None or not request_id or bool(slash) != bool(step):
            return None
        return HotRoute(*route, request_id)

    # Nothing that waits keeps a request, or its body: its tokens may be many in a long queue.

    def _select(self, exchange: Exchange) -> Answer | Later:
        plainly = None if exchange.head.is_plain else self._select_behind(exchange)
        if plainly is not None:
            return plainly
        if _is_long(exchange):
            return _with_long_request(exchange, self._select_request, self._selected)
        return self._selected(exchange, self._select_request(exchange))

    def _select_behind(self, exchange: Exchange) -> Answer | None:
        """A plain request behind a head that is none, as with a token or in a trace."""
        head, request_id = exchange.head, exchange.header(_ID_HEADER)
        asks_for_more = not head.headers.keys().isdisjoint(_ASKING_HEADERS)
        if asks_for_more or exchange.caller.tenant is not None or request_id == "":
            return None
        if request_id is not None and len(request_id) > MAX_ID_CHARACTERS:
            return None
        return self._select_plain(head, request_id, exchange.body)

    def _select_plain(self, head: Head, request_id: str | None, body: bytes) -> Answer | None:
        found = self._plain_selects.read(head, body)
        if found is None:
            return None
        decision = self._commands.select_plain(found[0], request_id, found[1])
        return None if decision is None else answer(decision)

    def _select_and_reserve(self, exchange: Exchange) -> Answer | Later:
        if _is_long(exchange):
            return _with_long_request(exchange, self._select_request, self._booked)
        return self._booked(exchange, self._select_request(exchange))

    def _reserve(self, exchange: Exchange) -> Answer | Later:
        if _is_long(exchange):
            return _with_long_request(exchange, self._reserve_request, self._reserved)
        return self._reserved(exchange, self._reserve_request(exchange))

    def _prefill_complete(self, exchange: Exchange) -> Answer:
        usage = _usage(exchange, self._prefill_complete_bodies)
        commands_of(self._commands, exchange.caller).prefill_complete(exchange.request_id, usage)
        return OK

    def _output_block(self, exchange: Exchange) -> Answer:
        exchange.check_json()
        body = self._output_block_bodies.read_now(exchange.body, exchange.unknown)
        commands_of(self._commands, exchange.caller).output_block(
            exchange.request_id, body.decay_fraction
        )
        return OK

    def _free(self, exchange: Exchange) -> Answer:
        usage = _usage(exchange, self._free_bodies)
        commands_of(self._commands, exchange.caller).free(exchange.request_id, usage)
        return OK

    def _batch(self, exchange: Exchange) -> Answer | Later:
        exchange.check_json()
        if _is_long(exchange):
            return _with_long_request(exchange, self._batch_of, self._progressed)
        return self._progressed(exchange, self._batch_of(exchange))

    def _batch_of(self, exchange: Exchange) -> ReservationBatch:
        return self._batch_bodies.read_now(exchange.body, exchange.unknown)

    def _progressed(self, exchange: Exchange, batch: ReservationBatch) -> Answer | Later:
        if self._batches.is_immediate(batch):
            return answer(self._batches.progress_now(exchange.caller, batch))
        return _answered(self._batches.progress(exchange.caller, batch), answer)

    def _selected(self, exchange: Exchange, request: SelectRequest) -> Answer | Later:
        commands = commands_of(self._commands, exchange.caller)
        told = decision_answer(exchange.head.query_string)
        if commands.is_immediate(request):
            return told(commands.select_now(request))
        return _answered(commands.select(request), told)

    def _booked(self, exchange: Exchange, request: SelectRequest) -> Answer | Later:
        commands = commands_of(self._commands, exchange.caller)
        told = decision_answer(exchange.head.query_string)
        if not commands.is_immediate(request):
            return _answered(commands.select_and_reserve(request, exchange.gone), told)
        submitted = commands.submit_now(request)
        if isinstance(submitted, Decision):
            return told(submitted)
        return _answered(commands.decision(submitted, exchange.gone), told)

    def _reserved(self, exchange: Exchange, request: BookRequest) -> Later:
        booking = commands_of(self._commands, exchange.caller).reserve(request)
        return _answered(booking, partial(answer, status=201))

    def _select_request(self, exchange: Exchange) -> SelectRequest:
        request, head = self._select_requests.read(exchange), exchange.head
        if head.is_plain:
            return identified(request, head.plain_id)
        said = {
            name: head.headers[key].decode("latin-1")
            for key, name in _SELECT_HEADERS.items()
            if key in head.headers
        }
        return asked_with(request, said)

    def _reserve_request(self, exchange: Exchange) -> BookRequest:
        request = self._reserve_requests.read(exchange)
        header = exchange.header(REQUEST_ID_HEADER.encode())
        request_id = request_id_of(request.request_id, header)
        return msgspec.structs.replace(request, request_id=request_id)


def _optional(body_type: type[U]) -> JsonReader[U | None]:
    return JsonReader(body_type | None)  # type: ignore[arg-type]


def _usage(exchange: Exchange, bodies: JsonReader[U | None]) -> Usage | None:
    """What an engine said, where a body says it; one that is no JSON is as good as none."""
    if not exchange.body or exchange.media_type != JSON:
        return None
    body = bodies.read_now(exchange.body, exchange.unknown)
    return None if body is None else body.usage


def _is_long(exchange: Exchange) -> bool:
    """Whether a body takes so long to decode that others would wait. Packed tokens never do."""
    return len(exchange.body) > THREAD_BYTES and exchange.head.media_type == JSON


async def _with_long_request(
    exchange: Exchange,
    read: Callable[[Exchange], T],
    act: Callable[[Exchange, T], Answer | Later],
) -> Answer:
    answer_or_later = act(exchange, await asyncio.to_thread(read, exchange))
    del exchange
    return answer_or_later if isinstance(answer_or_later, Answer) else await answer_or_later


async def _answered(reply: Awaitable[T], told: Callable[[T], Answer]) -> Answer:
    return told(await reply)
