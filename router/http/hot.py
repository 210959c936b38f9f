"""Routes that every request of a fleet goes through: the front answers them itself."""

from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from router.commands import (
    REQUEST_ID_HEADER,
    SELECT_HEADERS,
    Commands,
    asked_with,
    request_id_of,
)
from router.http.answers import OK, Answer, answer
from router.http.exchange import Exchange
from router.process.bodies import decode_body
from router.protocol.requests import (
    OutputBlockRequest,
    PrefillCompleteRequest,
    ReserveRequest,
    SelectRequest,
)

Handler: TypeAlias = Callable[[Exchange], Awaitable[Answer]]
T = TypeVar("T")

_SELECT_HEADERS = tuple((name, name.encode()) for name in SELECT_HEADERS.values())


class HotRoute(Struct, frozen=True):
    """A route, as it is counted, and who answers it; `request_id`: of the path asked for."""

    path: str
    handler: Handler
    request_id: str = ""


class HotRoutes:
    """The routes, and their handlers on one set of commands."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._decode_select = msgspec.json.Decoder(SelectRequest).decode
        self._decode_reserve = msgspec.json.Decoder(ReserveRequest).decode
        done: msgspec.json.Decoder[PrefillCompleteRequest | None]
        done = msgspec.json.Decoder(PrefillCompleteRequest | None)
        self._decode_prefill_complete = done.decode
        self._decode_output_block = msgspec.json.Decoder(OutputBlockRequest).decode
        self._whole: dict[tuple[str, str], HotRoute] = {
            ("POST", route.path): route
            for route in (
                HotRoute("/select", self._select),
                HotRoute("/select_and_reserve", self._select_and_reserve),
                HotRoute("/reservations", self._reserve),
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

    async def _select(self, exchange: Exchange) -> Answer:
        request = await self._select_request(exchange)
        return answer(await self._commands.select(request))

    async def _select_and_reserve(self, exchange: Exchange) -> Answer:
        # Nothing here keeps the request, whose tokens may be many in a long queue.
        gone = exchange.gone
        return answer(
            await self._commands.select_and_reserve(await self._select_request(exchange), gone)
        )

    async def _reserve(self, exchange: Exchange) -> Answer:
        body = await _json_body(exchange, self._decode_reserve)
        header = exchange.header(REQUEST_ID_HEADER.encode())
        request_id = request_id_of(body.request_id, header)
        request = msgspec.structs.replace(body, request_id=request_id)
        return answer(await self._commands.reserve(request), 201)

    async def _prefill_complete(self, exchange: Exchange) -> Answer:
        usage = None
        if exchange.body and exchange.media_type == "application/json":
            body = await _json_body(exchange, self._decode_prefill_complete)
            usage = None if body is None else body.usage
        self._commands.prefill_complete(exchange.request_id, usage)
        return OK

    async def _output_block(self, exchange: Exchange) -> Answer:
        body = await _json_body(exchange, self._decode_output_block)
        self._commands.output_block(exchange.request_id, body.decay_fraction)
        return OK

    async def _free(self, exchange: Exchange) -> Answer:
        self._commands.free(exchange.request_id)
        return OK

    async def _select_request(self, exchange: Exchange) -> SelectRequest:
        request = await _json_body(exchange, self._decode_select)
        said = {
            name: exchange.headers[key].decode("latin-1")
            for name, key in _SELECT_HEADERS
            if key in exchange.headers
        }
        return asked_with(request, said)


async def _json_body(exchange: Exchange, decode: Callable[[bytes], T]) -> T:
    exchange.check_json()
    return await decode_body(decode, exchange.body)
