"""Control of an agent's tiers over HTTP.

GET  /tiers                 ?dp_rank= &level=G2 &hashes=true
POST /tiers/reset_pool      {"level": "G2"}
POST /tiers/reset_blocks    {"level": "G2", "sequence_hashes": [...]}
POST /tiers/reset_all       {}
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.errors import InvalidFieldError
from router.runtime.process.json_bodies import decode_body, read_body
from worker_agent.operations.messages import (
    BODY_LIMIT_BYTES,
    ResetAll,
    ResetBlocks,
    ResetPool,
    StatusQuery,
    TierCommand,
    TierCommands,
)
from worker_agent.process.http import Handler, json_response

C = TypeVar("C", bound=TierCommand)

BODY_TIMEOUT_S = 30.0


class TierRoutes:
    """The request handlers."""

    def __init__(self, control: TierCommands) -> None:
        self._control = control

    def routes(self) -> tuple[tuple[str, str, Handler], ...]:
        """Return method, path and handler of each route."""
        return (
            ("GET", "/tiers", self.tiers),
            ("POST", "/tiers/reset_pool", self._posted(ResetPool)),
            ("POST", "/tiers/reset_blocks", self._posted(ResetBlocks)),
            ("POST", "/tiers/reset_all", self._posted(ResetAll)),
        )

    async def tiers(self, request: Request) -> Response:
        """Return the status of the tiers."""
        query = _query(dict(request.query_params))
        return json_response(await self._control.answer(query))

    def _posted(self, command_type: type[C]) -> Handler:
        decode: Callable[[bytes], C] = msgspec.json.Decoder(command_type).decode

        async def handle(request: Request) -> Response:
            body = await read_body(request.stream(), BODY_LIMIT_BYTES, BODY_TIMEOUT_S)
            return json_response(await self._control.answer(await decode_body(decode, body)))

        return handle


def _query(parameters: dict[str, str]) -> StatusQuery:
    try:
        return msgspec.convert(parameters, StatusQuery, strict=False)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        field = place.removesuffix("`").removeprefix(".") or "query"
        allowed = "dp_rank, level (G1 to G4), hashes (true or false)"
        raise InvalidFieldError(field, reason, allowed, status=422) from error
