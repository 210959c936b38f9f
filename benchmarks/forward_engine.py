"""A trivial engine: it answers at once, or streams so many chunks, one every so often.

    python benchmarks/forward_engine.py PORT CHUNKS INTERVAL_S

A chunk says when it was sent, in nanoseconds of the machine's steady clock.
"""

import asyncio
import json
import sys
import time

import httptools
import uvloop

COMPLETION = json.dumps(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "default",
        "choices": [{"index": 0, "text": "hi", "finish_reason": "length", "logprobs": None}],
        "usage": {"prompt_tokens": 1000, "completion_tokens": 1, "total_tokens": 1001},
    }
).encode()
TOKENS = json.dumps({"count": 1000, "max_model_len": 4096, "tokens": [*range(1000)]}).encode()
MODELS = b'{"object":"list","data":[{"id":"default","object":"model","owned_by":"engine"}]}'
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
TEXT = (
    '{"id":"cmpl-1","object":"text_completion","created":1,"model":"default","choices":'
    '[{"index":0,"text":"%d","finish_reason":null,"logprobs":null,"token_ids":[7]}]}'
)


class Engine(asyncio.Protocol):
    def __init__(self, chunks: int, interval_s: float) -> None:
        self._chunks = chunks
        self._interval_s = interval_s
        self._streaming: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)
        self._body = self._url = b""

    def connection_lost(self, _: Exception | None) -> None:
        if self._streaming is not None:
            self._streaming.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body = self._url = b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if b'"stream":true' in self._body or b'"stream": true' in self._body:
            self._streaming = asyncio.get_running_loop().create_task(self._stream())
        else:
            said = {b"/tokenize": TOKENS, b"/v1/models": MODELS}.get(self._url, COMPLETION)
            head = (
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            )
            self._transport.write(head % len(said) + said)

    async def _stream(self) -> None:
        self._transport.write(STREAM_HEAD)
        for _ in range(self._chunks):
            self._event((TEXT % time.monotonic_ns()).encode())
            await asyncio.sleep(self._interval_s)
        self._event(b"[DONE]")
        self._transport.write(b"0\r\n\r\n")

    def _event(self, data: bytes) -> None:
        event = b"data: " + data + b"\n\n"
        self._transport.write(b"%x\r\n%s\r\n" % (len(event), event))


async def serve(port: int, chunks: int, interval_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Engine(chunks, interval_s), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
