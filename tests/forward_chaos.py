"""Forwarding among engines that misbehave, clients that vanish and routers that die.

    PYTHONPATH=.:tests python tests/forward_chaos.py [--seconds 600] [--seed 1]

Five engines hang, trickle, send garbage, close in the middle, refuse, redirect; clients hang up
whenever they like; two routers are killed, or stopped, and started again in turn. Every answer that
came whole is compared with what it has to be; every other has to be some engine's doing. At the end
no router has a reservation left, none expired, and nobody is being answered.
"""

import argparse
import asyncio
import json
import random
import re
import socket
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import httpx

from forwarding import RunningForward, lines
from router.publisher.bus import connection
from running import FakeWorker, RunningRouter
from servers import NatsServer, eventually
from upstreams import STREAM_END, STREAM_HEAD, Upstream, chunk, event, response

ENGINES, CLIENTS = 5, 12
FAULT_CHANCE, VANISH_CHANCE = 0.25, 0.1
TRICKLE_BYTES = 7
PATIENCE_S = 0.5
"""Of the process that forwards, with engines that say nothing."""

CLIENT_PATIENCE_S = 120.0
REQUEST_ID = re.compile(r"x-request-id: (\S+)", re.IGNORECASE)


class Engine:
    """Answers with the numbers that follow the prompt's, so that whoever goes on says the same."""

    def __init__(self, worker_id, dice, faults):
        self.worker_id = worker_id
        self.upstream = Upstream(self.answer)
        self._dice = dice
        self._faults = faults

    async def answer(self, upstream, writer):
        head, content = upstream.requests.pop(0)
        if not head.startswith("POST /v1/"):  # a probe, or a text to tokenise
            said = response() if head.startswith("GET") else response(b"{}", "404 Not Found")
            writer.write(said)
            return
        fault = None
        if self._dice.random() < FAULT_CHANCE:
            fault = self._dice.choice(FAULTS)
            self._faults.setdefault(REQUEST_ID.search(head)[1], []).append(fault.__name__)
        await _answer(json.loads(content), writer, fault)


async def _answer(body, writer, fault):
    is_chat = "messages" in body
    first = 0 if is_chat else len(body["prompt"])
    words = [*range(first, first + body["max_tokens"])]
    if not body.get("stream"):
        choice = {"index": 0, "text": " ".join(map(str, words)), "finish_reason": "length"}
        usage = {"prompt_tokens": first, "completion_tokens": len(words)}
        whole = response(json.dumps({"id": "a", "choices": [choice], "usage": usage}).encode())
        await (fault or as_it_is)(writer, [whole])
        return
    pieces = [STREAM_HEAD, *(_piece(word, word == words[-1], is_chat) for word in words)]
    usage = {"prompt_tokens": first, "completion_tokens": len(words)}
    pieces += [event({"id": "a", "choices": [], "usage": usage}), event(b"[DONE]"), STREAM_END]
    await (fault or as_it_is)(writer, pieces)


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


class Chaos:
    """One run; `outcomes`: what became of requests; `wrong`: what nobody can be blamed for."""

    def __init__(self, seed, nats_url):
        self.dice = random.Random(seed)
        self.nats_url = nats_url
        self.faults = {}
        self.outcomes = Counter()
        self.wrong = []
        self.requests = 0
        self.begun = self.restarts = 0
        self.engines = [
            Engine(each, random.Random(seed + each), self.faults) for each in range(1, ENGINES + 1)
        ]

    async def run(self, seconds):
        """Raises AssertionError."""
        async with AsyncExitStack() as stack:
            for engine in self.engines:
                await stack.enter_async_context(engine.upstream.running())
            bus = await stack.enter_async_context(connection(self.nats_url, "w", lambda _: None))
            for engine in self.engines:
                reporting = asyncio.create_task(await self._worker(bus, engine))
                stack.push_async_callback(asyncio.wait, [reporting])
                stack.callback(reporting.cancel)
            self.routers = [await self._router() for _ in range(2)]
            forward = RunningForward(
                "http://127.0.0.1:1",
                nats_url=self.nats_url,
                namespace="test",
                first_byte_timeout_s=PATIENCE_S,
                idle_timeout_s=PATIENCE_S,
                breaker_open_s=0.2,
                max_attempts=ENGINES,
            )
            self.forward = await stack.enter_async_context(forward.running())
            await self._disturbed(seconds)
            await self._check_books()
            for _, life in self.routers:
                await life.aclose()

    async def _disturbed(self, seconds):
        ends_s = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(self._disturb_routers(ends_s))
            for _ in range(CLIENTS):
                group.create_task(self._ask_until(ends_s))

    async def _worker(self, bus, engine):
        """What routers see of an engine; it tells of itself as long as all this lasts."""
        worker = FakeWorker(bus, engine.worker_id, endpoint=engine.upstream.url)
        await worker.announce()
        await worker.deliver()
        return worker.report_forever()

    async def _router(self):
        life = AsyncExitStack()
        self.begun += 1
        settings = {"name": f"r{self.begun}", "reservation_ttl_s": 86_400.0}
        running = RunningRouter(self.nats_url, **settings).running()
        router = await life.enter_async_context(running)
        for engine in self.engines:
            await eventually(partial(router.trusts, engine.worker_id))
        return router, life

    async def _disturb_routers(self, ends_s):
        """One after the other dies without a word, or stops as it should; there is always one."""
        while time.monotonic() < ends_s:
            await asyncio.sleep(self.dice.uniform(2, 6))
            await self._restarted()

    async def _restarted(self):
        (router, life), *others = self.routers
        if self.dice.random() < 0.5:
            _stop_accepting(router.config.http_port)
            router.kill()
        with suppress(asyncio.CancelledError):
            await life.aclose()
        self.routers = [*others, await self._router()]
        self.restarts += 1

    # ── Clients ──────────────────────────────────────────────────────────────────────────────────

    async def _ask_until(self, ends_s):
        async with httpx.AsyncClient(timeout=CLIENT_PATIENCE_S) as client:
            while time.monotonic() < ends_s:
                self.requests += 1
                request_id = f"r{self.requests}"
                outcome = await self._ask(client, request_id)
                faults = self.faults.pop(request_id, [])
                self.outcomes[outcome] += 1
                if outcome.startswith("wrong") and not faults:
                    self.wrong.append((request_id, outcome))

    async def _ask(self, client, request_id):
        dice = self.dice
        tokens = dice.randint(1, 30)
        body = {"model": "default", "max_tokens": tokens, "stream": dice.random() < 0.7}
        path, first = "/v1/completions", dice.randint(1, 60)
        if dice.random() < 0.2:
            path, first = "/v1/chat/completions", 0
            body["messages"] = [{"role": "user", "content": "x" * dice.randint(1, 99)}]
        else:
            body["prompt"] = [dice.randrange(3)] * first
        vanishes_s = dice.uniform(0, 0.3) if dice.random() < VANISH_CHANCE else CLIENT_PATIENCE_S
        url = self.forward.url + path
        asking = client.post(url, json=body, headers={"x-request-id": request_id})
        try:
            async with asyncio.timeout(vanishes_s):
                answer = await asking
        except TimeoutError:
            return "vanished" if vanishes_s < CLIENT_PATIENCE_S else "wrong: no answer"
        except httpx.HTTPError as error:
            return f"wrong: {type(error).__name__}"
        return self._judged(answer, body, [*range(first, first + tokens)])

    def _judged(self, answer, body, words):
        if answer.status_code != 200:
            return f"wrong: {answer.status_code} {answer.text[:150]}"
        if not body["stream"]:
            with suppress(ValueError, LookupError):
                text = answer.json()["choices"][0]["text"]
                return "whole" if text.split() == [*map(str, words)] else f"wrong: {text[:150]}"
            return f"wrong: {answer.text[:150]}"
        said = lines(answer.text)
        choices = [
            choice
            for each in said
            if each.startswith("{")
            for choice in json.loads(each).get("choices", ())
        ]
        texts = [each.get("text") or each.get("delta", {}).get("content", "") for each in choices]
        heard = "".join(texts).split()
        if heard != [*map(str, words)][: len(heard)]:
            # Nobody's fault is an excuse for words that are not those.
            self.wrong.append((answer.headers["x-request-id"], f"words {heard} of {words}"))
        if said and said[-1] == "[DONE]" and heard == [*map(str, words)]:
            return "whole"
        return f"wrong: {said[-1][:150] if said else 'nothing'}"

    # ── The end ──────────────────────────────────────────────────────────────────────────────────

    async def _check_books(self):
        await eventually(self._nobody_is_answered)
        await eventually(self._nothing_is_booked)
        for router, _ in self.routers:
            expired = 'kv_router_reservations_dropped_total{reason="expired"}'
            assert not await router.metric(expired), "reservations expired"
        assert self.outcomes["whole"], self.outcomes
        assert not self.wrong, self.wrong[:10]

    async def _nobody_is_answered(self):
        return await self.forward.metric("kv_router_forward_in_flight") == 1  # who asks this

    async def _nothing_is_booked(self):
        loads = [
            scope
            for router, _ in self.routers
            for scope in (await router.client.get("/loads")).json()
        ]
        return not any(rank["active_requests"] for scope in loads for rank in scope["loads"])


def _stop_accepting(port):
    """As with a process that dies: a socket that is closed while its loop still waits for it would
    deafen the next that gets its number.
    """
    loop = asyncio.get_running_loop()
    for key in tuple(loop._selector.get_map().values()):
        args = key.data[0]._args if key.data[0] is not None else ()
        for each in args:
            if isinstance(each, socket.socket) and each.getsockname() == ("127.0.0.1", port):
                loop.remove_reader(key.fd)


@asynccontextmanager
async def bus():
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder))
        server.start()
        try:
            yield server.url
        finally:
            server.kill()


async def main(seconds, seed):
    async with bus() as url:
        chaos = Chaos(seed, url)
        try:
            await chaos.run(seconds)
        finally:
            grouped = Counter({k[:60]: n for k, n in chaos.outcomes.most_common()})
            said = {"requests": chaos.requests, "restarts": chaos.restarts, **grouped}
            sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.write("no reservation is left, and every failure was an engine's\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    sys.exit(asyncio.run(main(arguments.seconds, arguments.seed)))
