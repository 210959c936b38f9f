"""Ids of an HTTP request, taken from its headers and given back in its answer's."""

from collections.abc import Iterable

from starlette.types import Message, Send

from router.http.answers import Answer
from router.process.request_ids import REQUEST_ID, TRACEPARENT, RequestIds

_REQUEST_ID, _TRACEPARENT = REQUEST_ID.encode(), TRACEPARENT.encode()


def ids_of(headers: Iterable[tuple[bytes, bytes]]) -> RequestIds:
    """The ids that headers, named in lower case, say. Whoever says two traces says none."""
    request_id: bytes | None = None
    traceparent: bytes | None = None
    for name, value in headers:
        if name == _REQUEST_ID and request_id is None:
            request_id = value
        elif name == _TRACEPARENT:
            traceparent = value if traceparent is None else b""
    return RequestIds(
        None if request_id is None else request_id.decode("latin-1"),
        None if traceparent is None else traceparent.decode("latin-1"),
    )


def with_ids(ids: RequestIds, answer: Answer) -> Answer:
    """An answer that says the ids, where the caller said any."""
    said = ids.answered()
    if not said:
        return answer
    headers = tuple((name.encode(), value.encode()) for name, value in said.items())
    return Answer(answer.body, answer.status, (*answer.headers, *headers))


def answering(ids: RequestIds, send: Send) -> Send:
    """Sends as `send` does, and says the ids in the answer's headers, where the caller said any."""
    headers = [(name.encode(), value.encode()) for name, value in ids.answered().items()]
    if not headers:
        return send

    async def send_with_ids(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *headers]}
        await send(message)

    return send_with_ids
