"""A trivial engine: it responds at once, or streams chunks at an interval.

    python benchmarks/forward_engine.py PORT CHUNKS INTERVAL_S [TOKENIZER]

A chunk says when it was sent, in nanoseconds of the machine's steady clock. TOKENIZER: a file of
`tokenizers`, for `/tokenize` of texts.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable

import httptools
import uvloop

Tokenize = Callable[[bytes], tuple[int, bytes]]

COMPLETION = json.dumps(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "text": "hi", "finish_reason": "length", "logprobs": None}],
        "usage": {"prompt_tokens": 1000, "completion_tokens": 1, "total_tokens": 1001},
    }
).encode()
METRICS = b"""\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="100000"} 1.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 0.0
"""  # noqa: E501 - one line each
GIVEN = {
    b"/health": b"{}",
    b"/metrics": METRICS,
    b"/v1/models": b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm"}]}',
}
HEAD = b"HTTP/1.1 %d OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
TEXT = (
    '{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":'
    '[{"index":0,"text":"%d","finish_reason":null,"logprobs":null,"token_ids":[7]}]}'
)


class Engine(asyncio.Protocol):
    def __init__(self, chunks: int, interval_s: float, tokenize: Tokenize | None) -> None:
        self._chunks = chunks
        self._interval_s = interval_s
        self._tokenize = tokenize
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
        if self._url != b"/v1/completions":
            status, said = (200, GIVEN[self._url]) if self._url in GIVEN else (404, b"")
            if self._url == b"/tokenize" and self._tokenize is not None:
                status, said = self._tokenize(self._body)
            self._transport.write(HEAD % (status, len(said), said))
        elif b'"stream":true' in self._body or b'"stream": true' in self._body:
            self._streaming = asyncio.get_running_loop().create_task(self._stream())
        else:
            self._transport.write(HEAD % (200, len(COMPLETION), COMPLETION))

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


def tokenize_with(path: str) -> Tokenize:
    """Return an engine's `/tokenize` with this tokenizer, for texts."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)

    def tokenize(body: bytes) -> tuple[int, bytes]:
        text = json.loads(body).get("prompt")
        if text is None:  # a chat
            return 400, b"{}"
        ids = tokenizer.encode(text).ids
        return 200, json.dumps({"count": len(ids), "max_model_len": 4096, "tokens": ids}).encode()

    return tokenize


async def serve(port: int, chunks: int, interval_s: float, tokenize: Tokenize | None) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Engine(chunks, interval_s, tokenize), "127.0.0.1", port, backlog=4096
    )
    await server.serve_forever()


if __name__ == "__main__":
    own = tokenize_with(sys.argv[4]) if sys.argv[4:] and sys.argv[4] else None
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), own))
