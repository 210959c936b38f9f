"""Engines that answer with the numbers that follow the prompt's, and misbehave as dice fall."""

import asyncio
import json
import re
from weakref import WeakSet

from support.engines.upstreams import STREAM_END, STREAM_HEAD, Upstream, chunk, event, response

FAULT_CHANCE = 0.25
TRICKLE_BYTES = 7
REQUEST_ID = re.compile(r"x-request-id: (\S+)", re.IGNORECASE)


class Engine:
    """Answers with the numbers that follow the prompt's, so that the next engine says the same.

    `faults`: gets each, by request id. Bytes behind an answer are the next one's, if they come when
    that was asked for already: they cannot be distinguished, so they are its fault, too.
    """

    def __init__(self, worker_id, dice, faults):
        self.worker_id = worker_id
        self.upstream = Upstream(self.answer)
        self._dice = dice
        self._faults = faults
        self._spoilt = WeakSet()

    async def answer(self, upstream, writer):
        head, content = upstream.requests.pop(0)
        if not head.startswith("POST /v1/"):  # a probe, or a text to tokenise
            said = response() if head.startswith("GET") else response(b"{}", "404 Not Found")
            writer.write(said)
            return
        faults = self._faults.setdefault(REQUEST_ID.search(head)[1], [])
        if writer in self._spoilt:
            faults.append("said something before it was asked")
        fault = as_it_is
        if self._dice.random() < FAULT_CHANCE:
            fault = self._dice.choice(FAULTS)
            faults.append(fault.__name__)
        if fault is says_more_than_it_should:
            self._spoilt.add(writer)
        await _answer(json.loads(content), writer, fault)


async def _answer(body, writer, fault):
    is_chat = "messages" in body
    first = 0 if is_chat else len(body["prompt"])
    words = [*range(first, first + body["max_tokens"])]
    if not body.get("stream"):
        choice = {"index": 0, "text": " ".join(map(str, words)), "finish_reason": "length"}
        usage = {"prompt_tokens": first, "completion_tokens": len(words)}
        whole = response(json.dumps({"id": "a", "choices": [choice], "usage": usage}).encode())
        await fault(writer, [whole])
        return
    pieces = [STREAM_HEAD, *(_piece(word, word == words[-1], is_chat) for word in words)]
    usage = {"prompt_tokens": first, "completion_tokens": len(words)}
    pieces += [event({"id": "a", "choices": [], "usage": usage}), event(b"[DONE]"), STREAM_END]
    await fault(writer, pieces)


def _piece(word, is_last, is_chat):
    said = {"delta": {"content": f"{word} "}} if is_chat else {"text": f"{word} "}
    end = "length" if is_last else None
    choice = {"index": 0, **said, "finish_reason": end, "token_ids": [word]}
    return event({"id": "a", "created": 1, "choices": [choice]})


async def as_it_is(writer, pieces):
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0)


async def trickles(writer, pieces):
    data = b"".join(pieces)
    for start in range(0, len(data), TRICKLE_BYTES):
        await as_it_is(writer, [data[start : start + TRICKLE_BYTES]])


async def hangs(_, __):
    await asyncio.Event().wait()


async def falls_silent(writer, pieces):
    await as_it_is(writer, pieces[: len(pieces) // 2])
    await hangs(writer, pieces)


async def closes(writer, _):
    writer.close()


async def closes_in_the_middle(writer, pieces):
    await as_it_is(writer, pieces[: len(pieces) // 2] or [pieces[0][: len(pieces[0]) // 2]])
    writer.close()


async def says_garbage(writer, _):
    writer.write(b"\x00\xff garbage \r\n\r\n")


async def says_garbage_in_the_middle(writer, pieces):
    await as_it_is(writer, pieces[: len(pieces) // 2])
    writer.write(b"zz\r\nnot a chunk")


async def says_more_than_it_should(writer, pieces):
    await as_it_is(writer, [*pieces, b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"])


async def has_two_lengths(writer, _):
    writer.write(response(b"{}", "200 OK", "content-length: 5"))


async def breaks_in_its_stream(writer, pieces):
    said = {"error": {"message": "engine is dead"}}
    await as_it_is(writer, [STREAM_HEAD, *pieces[1 : len(pieces) // 2], event(said), STREAM_END])


async def is_busy(writer, _):
    writer.write(response(b"{}", "429 Too Many Requests", "retry-after: 1"))


async def fails(writer, _):
    writer.write(response(b"{}", "500 Internal Server Error"))


async def redirects(writer, _):
    writer.write(response(b"", "307 Temporary Redirect", "location: http://127.0.0.1:1/"))


async def sends_too_large_a_chunk_head(writer, _):
    writer.write(STREAM_HEAD + chunk(b"data: {")[:-2] + b"x" * 100)


FAULTS = (
    trickles,
    hangs,
    falls_silent,
    closes,
    closes_in_the_middle,
    says_garbage,
    says_garbage_in_the_middle,
    says_more_than_it_should,
    has_two_lengths,
    breaks_in_its_stream,
    is_busy,
    fails,
    redirects,
    sends_too_large_a_chunk_head,
)
