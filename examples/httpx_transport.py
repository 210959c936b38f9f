"""A transport of httpx whose completions and chats go where the router says.

    pip install kv-router openai

Whatever is built on httpx takes it, such as OpenAI's client:

    async with RouterClient.over_http("http://127.0.0.1:8092") as router:
        transport = RoutedTransport(router, tokens_of)
        http = httpx.AsyncClient(transport=transport, timeout=600)
        client = AsyncOpenAI(base_url="http://ENGINE:8000/v1", api_key="none", http_client=http)

Each request is booked, and sent to the chosen worker; the first piece of its response and its end
are reported. Other requests go to their own URL.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import httpx
import msgspec

from router.client import Decision, Reservation, RouterClient, SelectRequest
from router.errors import KvRouterError

PLACED = ("/v1/completions", "/v1/chat/completions")
JSON = {"content-type": "application/json"}
TokensOf: TypeAlias = Callable[[dict[str, Any]], Awaitable[Sequence[int]]]
"""The tokens of a request's body, the engines' own: prefixes are found by tokens."""


class RoutedTransport(httpx.AsyncBaseTransport):
    """Places requests by a router, and sends them by another transport."""

    def __init__(
        self,
        router: RouterClient,
        tokens_of: TokensOf,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._router = router
        self._tokens_of = tokens_of
        self._transport = transport or httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the response of the chosen worker, or the router's refusal with its status."""
        if request.method != "POST" or request.url.path not in PLACED:
            return await self._transport.handle_async_request(request)
        body = json.loads(await request.aread())
        wanted = SelectRequest(
            token_ids=await self._tokens_of(body),
            expected_output_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
        )
        try:
            reservation = await self._router.reserved(wanted)
        except KvRouterError as error:
            refusal = msgspec.json.encode(error.body())
            return httpx.Response(error.http_status, headers=JSON, content=refusal)
        try:
            response = await self._transport.handle_async_request(
                _for(request, reservation.decision)
            )
        except BaseException:
            reservation.leave()
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _FollowedStream(response.stream, reservation)
        return response

    async def aclose(self) -> None:
        """Close the transport below; the router's client stays as it is."""
        await self._transport.aclose()


class _FollowedStream(httpx.AsyncByteStream):
    """The body of a response, whose events are counted as tokens."""

    def __init__(self, stream: httpx.AsyncByteStream, reservation: Reservation) -> None:
        self._stream = stream
        self._reservation = reservation

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            self._reservation.note_tokens(piece.count(b"data: {"))
            yield piece

    async def aclose(self) -> None:
        """Close it, and end the booking, also if the caller has stopped reading."""
        self._reservation.leave()
        await self._stream.aclose()


def _for(request: httpx.Request, place: Decision) -> httpx.Request:
    """Return the request for the endpoint and the data-parallel rank of a decision."""
    headers = [each for each in request.headers.raw if each[0].lower() != b"host"]
    headers.append((b"x-data-parallel-rank", b"%d" % place.dp_rank))
    return httpx.Request(
        request.method,
        httpx.URL(place.endpoint).copy_with(raw_path=request.url.raw_path),
        headers=headers,
        content=request.content,
        extensions=request.extensions,
    )
