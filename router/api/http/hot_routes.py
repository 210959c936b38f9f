"""Latency-critical routes, served below the FastAPI application.

A handler returns its response at once unless it has to wait for something: no task, no thread, no
lock. Long bodies are decoded on another thread.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec.structs import force_setattr

from router.api.batches import BatchCommands
from router.api.caller_commands import Book, OverlapScores
from router.api.commands import Commands, PendingRequest, checked_usage
from router.api.http.answers import OK, Response, decision_response, response
from router.api.pending_requests import Disconnected
from router.api.request_headers import (
    READ_HEADERS,
    request_id_of,
    with_header_fields,
)
from router.api.token_requests import TokenRequests
from router.core.commands import Free, OutputBlock, PrefillComplete, Select, Submit
from router.protocol.batches import BatchReply, ReservationBatch
from router.protocol.replicas import PromptUsage
from router.protocol.replies import Decision, OverlapScoresReply, ReservationReply
from router.protocol.requests import (
    BookRequest,
    FreeRequest,
    OutputBlockRequest,
    PrefillCompleteRequest,
    PromptRequest,
    SelectRequest,
)
from router.runtime.http_server.exchange import BINARY, JSON, Exchange, HotRoute
from router.runtime.process.json_bodies import THREAD_BYTES, JsonReader
from router.runtime.security.caller import Caller
from router.runtime.security.guard import Guard

Later: TypeAlias = Coroutine[Any, Any, Response]
T = TypeVar("T")
FindRoute: TypeAlias = Callable[[str, str], HotRoute | None]
Act: TypeAlias = Callable[[Exchange, T], Response | Later]
U = TypeVar("U", PrefillCompleteRequest, FreeRequest)

BEFORE_ID = "/reservations/"
"""The beginning of the paths with the id of a reservation."""

_READ_HEADERS = {name.encode(): name for name in READ_HEADERS}


class HotRoutes:
    """The hot routes, and their handlers on one set of commands. `find_probe` finds other ones."""

    def __init__(self, commands: Commands, guard: Guard, find_probe: FindRoute) -> None:
        self._commands = commands
        self._find_probe = find_probe
        self._batches = BatchCommands(commands, guard, msgspec.json.Decoder)
        self._batch_bodies = JsonReader(ReservationBatch)
        self._select_requests = TokenRequests(SelectRequest)
        self._reserve_requests = TokenRequests(BookRequest)
        self._prompts = TokenRequests(PromptRequest)
        self._prefill_complete_bodies = _optional(PrefillCompleteRequest)
        self._free_bodies = _optional(FreeRequest)
        self._output_block_bodies = JsonReader(OutputBlockRequest)
        self._whole: dict[tuple[str, str], HotRoute] = {
            ("POST", route.path): route
            for route in (
                _reading("/select", self._select_request, partial(self._decided, Select)),
                _reading(
                    "/select_and_reserve", self._select_request, partial(self._decided, Submit)
                ),
                _reading("/reservations", self._reserve_request, self._reserved),
                _reading("/overlap_scores", self._prompts.read, self._scored),
                HotRoute(
                    "/reservations:batch",
                    partial(_act, self._batch_of, self._progressed),
                    media_types=(JSON,),
                ),
            )
        }
        progress = f"{BEFORE_ID}{{request_id}}"
        self._of_reservation: dict[tuple[str, str], HotRoute] = {
            ("POST", "prefill_complete"): HotRoute(
                f"{progress}/prefill_complete", self._prefill_complete
            ),
            ("POST", "output_block"): HotRoute(
                f"{progress}/output_block", self._output_block, (JSON,)
            ),
            ("DELETE", ""): HotRoute(progress, self._free),
        }

    def find(self, method: str, path: str) -> HotRoute | None:
        """Return the route of a request, or None."""
        found = self._whole.get((method, path))
        if found is not None:
            return found
        if not path.startswith(BEFORE_ID):
            return self._find_probe(method, path)
        request_id, slash, step = path.removeprefix(BEFORE_ID).partition("/")
        is_whole = bool(request_id) and bool(slash) == bool(step)
        return self._of_reservation.get((method, step)) if is_whole else None

    # Waiting coroutines keep no request and no body: tokens of a long queue would fill memory.

    def _prefill_complete(self, exchange: Exchange) -> Response:
        usage = _usage(exchange, self._prefill_complete_bodies) if exchange.received else None
        self._commands.handle(PrefillComplete(exchange.path_id, usage), exchange.caller)
        return OK

    def _output_block(self, exchange: Exchange) -> Response:
        body = self._output_block_bodies.read_now(exchange.body(), exchange.unknown)
        command = OutputBlock(exchange.path_id, body.decay_fraction)
        self._commands.handle(command, exchange.caller)
        return OK

    def _free(self, exchange: Exchange) -> Response:
        usage = _usage(exchange, self._free_bodies) if exchange.received else None
        self._commands.handle(Free(exchange.path_id, usage), exchange.caller)
        return OK

    def _batch_of(self, exchange: Exchange) -> ReservationBatch:
        return self._batch_bodies.read_now(exchange.body(), exchange.unknown)

    def _progressed(self, exchange: Exchange, batch: ReservationBatch) -> Response | Later:
        reply = self._batches.progress(exchange.caller, batch)
        return response(reply) if isinstance(reply, BatchReply) else _answered(reply, response)

    def _decided(
        self, make: type[Select | Submit], exchange: Exchange, request: SelectRequest
    ) -> Response | Later:
        query = exchange.head.query
        encode = decision_response(query) if query else response
        reply = self._commands.handle(make(request), exchange.caller)
        if isinstance(reply, Decision):
            return encode(reply)
        return self._later(exchange.caller, exchange.gone, reply, encode)

    async def _later(
        self,
        caller: Caller,
        gone: Disconnected,
        reply: PendingRequest | Awaitable[Decision | PendingRequest],
        encode: Callable[[Decision], Response],
    ) -> Response:
        """Return the response to a request that waits: for a thread, a store, or its turn."""
        decision = reply if isinstance(reply, PendingRequest) else await reply
        del reply  # Frees its tokens, which are large in a long queue.
        if isinstance(decision, PendingRequest):
            decision = await self._commands.decision(decision, caller, gone)
        return encode(decision)

    def _reserved(self, exchange: Exchange, request: BookRequest) -> Response | Later:
        reply = self._commands.handle(Book(request), exchange.caller)
        encode = partial(response, status=201)
        return encode(reply) if isinstance(reply, ReservationReply) else _answered(reply, encode)

    def _scored(self, exchange: Exchange, request: PromptRequest) -> Response | Later:
        reply = self._commands.handle(OverlapScores(request), exchange.caller)
        if isinstance(reply, OverlapScoresReply):
            return response(reply)
        return _answered(reply, response)

    def _select_request(self, exchange: Exchange) -> SelectRequest:
        request, head = self._select_requests.read(exchange), exchange.head
        fields = head.derived
        if fields is None:
            fields = head.derived = {
                name: head.headers[key].decode("latin-1")
                for key, name in _READ_HEADERS.items()
                if key in head.headers
            }
        if fields:
            request = with_header_fields(request, fields)
        request_id, given = request.request_id, exchange.ids.given
        if given is not None:
            request_id = request_id_of(request_id, given)
        if request.selection_id is not None:
            request_id = request.selection_id
        if request_id != request.request_id:
            force_setattr(request, "request_id", request_id)  # a copy would cost more than a call
        return request

    def _reserve_request(self, exchange: Exchange) -> BookRequest:
        request = self._reserve_requests.read(exchange)
        request_id = request_id_of(request.request_id, exchange.ids.given)
        return msgspec.structs.replace(request, request_id=request_id)


def _optional(body_type: type[U]) -> JsonReader[U | None]:
    return JsonReader(body_type | None)  # type: ignore[arg-type]


def _usage(exchange: Exchange, bodies: JsonReader[U | None]) -> PromptUsage | None:
    """Return the checked usage in a body, or None; a body that is not JSON counts as empty."""
    if exchange.head.media_type != JSON:
        return None
    read = bodies.read_now(exchange.body(), exchange.unknown)
    return None if read is None else checked_usage(read.usage)


def _reading(
    path: str,
    read: Callable[[Exchange], T],
    act: Act[T],
) -> HotRoute:
    """Return a route of new work that reads a prompt, and acts on it."""
    return HotRoute(path, partial(_act, read, act), media_types=(JSON, BINARY), is_new_work=True)


def _act(
    read: Callable[[Exchange], T],
    act: Act[T],
    exchange: Exchange,
) -> Response | Later:
    """Read a body, and act on it. A long one is read on another thread; packed tokens are fast."""
    if len(exchange.received) > THREAD_BYTES and exchange.head.media_type == JSON:
        return _act_on_long(read, act, exchange)
    return act(exchange, read(exchange))


async def _act_on_long(
    read: Callable[[Exchange], T],
    act: Act[T],
    exchange: Exchange,
) -> Response:
    answer_or_later = act(exchange, await asyncio.to_thread(read, exchange))
    del exchange
    return answer_or_later if isinstance(answer_or_later, Response) else await answer_or_later


async def _answered(reply: Awaitable[T], encode: Callable[[T], Response]) -> Response:
    return encode(await reply)
