"""Cycles: a booking, its first token and its end, as bytes made before the clock starts.

Every cycle has an id of its own. Three quarters of its prompt are held by a worker, the rest is
new. What a server answered is compared with what the fleet holds, after the clock has stopped.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count as numbers
from random import Random
from typing import Any, Literal, TypeAlias
from urllib.parse import urlencode
from uuid import UUID

import msgspec
import numpy as np
from msgspec import Struct, structs
from service_load import (
    HEAD_END,
    PATIENCE_S,
    Address,
    Connection,
    Generator,
    Load,
    NatsGenerator,
    Script,
    bare_request,
    nats_request,
    request_head,
    run_load,
)
from service_servers import ServerProcess
from service_world import BLOCK_SIZE, MODEL, Tokens, World

from router.client.bodies import encoded
from router.client.calls import REPORT, SELECT_AND_RESERVE, Question, received_fields
from router.client.progress_reports import EVERY_S
from router.protocol.batches import MAX_STEPS
from router.protocol.requests import SelectRequest
from router.protocol.subjects import Subjects
from router.runtime.http_client import Origin, Request

CALLS = ("select_and_reserve", "prefill_complete", "free")
SHARED = 0.75
SUBJECT = Subjects("default").router
ORIGIN = Origin("http", "localhost", 80)
HEARD_S = 5.0
"""Until a router has received ends from another."""

KEPT = 200
"""Answers of a round that are compared at least, if it has as many."""

Shape: TypeAlias = Literal["one segment", "two segments"]
Values: TypeAlias = Callable[[int], Mapping[str, Any]]


def nothing(_: int) -> Mapping[str, Any]:
    """No fields, whatever the number."""
    return {}


class Form(Struct, frozen=True):
    """How a cycle is asked for. `fields` and `headers`: further ones of its booking, and of each of
    its calls, by its number. `is_salted`: nothing of the prompt is held under its salt.
    """

    shape: Shape = "one segment"
    fields: Values = nothing
    headers: Values = nothing
    is_salted: bool = False


PLAIN = Form()


class BusCodec(Struct, frozen=True):
    """An encoding of messages on the bus."""

    media_type: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


BUS_CODECS = {
    "JSON": BusCodec("application/json", msgspec.json.encode, msgspec.json.decode),
    "msgpack": BusCodec("application/msgpack", msgspec.msgpack.encode, msgspec.msgpack.decode),
}


class Cycle(Struct, frozen=True):
    """One booking's life. `held_tokens`: of its prompt, by worker `holder` alone."""

    request_id: str
    holder: int
    held_tokens: int
    script: Script


class Cycles:
    """Makes cycles of prompts of one length; no two of them have an id or a prompt in common."""

    def __init__(self, world: World, tokens: int) -> None:
        self.tokens = tokens
        self._shared_tokens = int(SHARED * tokens)
        self._world = world
        self._shared = [
            msgspec.json.encode(prompt[: self._shared_tokens].tolist())[:-1] + b","
            for prompt in world.prompts[tokens]
        ]
        self._ids = Random(tokens)
        self._tails = np.random.default_rng(tokens)
        self._numbers = numbers()

    def made(self, count: int, form: Form = PLAIN) -> list[Cycle]:
        """The next of them."""
        return [self._made(next(self._numbers), form) for _ in range(count)]

    def booked_by_client(self, count: int) -> list[Cycle]:
        """The next of them as `router.client` books: one request each, the rest is reported."""
        return [self._booked_by_client(next(self._numbers)) for _ in range(count)]

    def booked_over_nats(self, count: int, codec: BusCodec) -> list[Cycle]:
        """The next of them as messages of the bus."""
        return [self._over_nats(place, next(self._numbers), codec) for place in range(count)]

    def prompts(self, count: int) -> list[bytes]:
        """Arrays of token ids alone, in JSON."""
        return [self._prompt(next(self._numbers)) for _ in range(count)]

    def _made(self, number: int, form: Form) -> Cycle:
        request_id = self._id()
        fields = {**MODEL, "selection_id": request_id, **form.fields(number)}
        rest = msgspec.json.encode(fields)[1:]
        body = b'{"token_ids":' + self._prompt(number) + b"," + rest
        lines = "".join(f"{name}: {value}\r\n" for name, value in form.headers(number).items())
        head = request_head("/select_and_reserve", len(body), "application/json", headers=lines)
        booking = (head, body) if form.shape == "two segments" else (head + body,)
        path = f"/reservations/{request_id}"
        script = (
            booking,
            (bare_request("POST", f"{path}/prefill_complete", lines),),
            (bare_request("DELETE", path, lines),),
        )
        return self._cycle(number, request_id, script, is_salted=form.is_salted)

    def _booked_by_client(self, number: int) -> Cycle:
        request_id = self._id()
        request = SelectRequest(token_ids=self._tokens(number), **MODEL)
        booking = client_booking(request_id, request)
        return self._cycle(number, request_id, ((booking,),))

    def _over_nats(self, place: int, number: int, codec: BusCodec) -> Cycle:
        request_id = self._id()
        booking = {"token_ids": self._tokens(number).tolist(), "selection_id": request_id, **MODEL}
        calls = [booking, {"request_id": request_id}, {"request_id": request_id}]
        script = tuple(
            (
                nats_request(
                    SUBJECT, place, codec.encode({"method": name, **call}), codec.media_type
                ),
            )
            for name, call in zip(CALLS, calls, strict=True)
        )
        return self._cycle(number, request_id, script)

    def _tokens(self, number: int) -> Tokens:
        prompts = self._world.prompts[self.tokens]
        shared = prompts[number % len(prompts)][: self._shared_tokens]
        return np.concatenate([shared, self._tail()])

    def _cycle(
        self, number: int, request_id: str, script: Script, *, is_salted: bool = False
    ) -> Cycle:
        held_tokens = 0 if is_salted else self._shared_tokens // BLOCK_SIZE * BLOCK_SIZE
        holder = self._world.holder(self.tokens, number)
        return Cycle(request_id, holder, held_tokens, script)

    def _prompt(self, number: int) -> bytes:
        tail = msgspec.json.encode(self._tail().tolist())
        return self._shared[number % len(self._shared)] + tail[1:]

    def _tail(self) -> Tokens:
        return self._tails.integers(0, 100_000, self.tokens - self._shared_tokens, dtype=np.uint32)

    def _id(self) -> str:
        return str(UUID(int=self._ids.getrandbits(128), version=4))


def cycled(
    servers: Sequence[ServerProcess],
    cycles: Sequence[Cycle],
    concurrency: int,
    per_s: float = math.inf,
) -> Load:
    """Run cycles, at one server or spread over some, and compare what was answered.

    Raises ValueError for a refusal, a wrong answer or a booking that is left.
    """
    addresses = [each.address for each in servers]
    scripts = [each.script for each in cycles]
    before_s = processor_s(servers)
    load = run_load(addresses, scripts, concurrency, per_s=per_s, keep_every=_every(cycles))
    load = structs.replace(load, processor_s=processor_s(servers) - before_s)
    compare(servers, cycles, load)
    return load


def cycled_over_nats(
    server: ServerProcess, port: int, cycles: Sequence[Cycle], concurrency: int, codec: BusCodec
) -> Load:
    """The same over the bus at a port of this machine."""
    generator = NatsGenerator(port, [each.script for each in cycles], concurrency)
    before_s = server.processor_s
    try:
        load = generator.run(_every(cycles))
    finally:
        generator.close()
    load = structs.replace(load, processor_s=server.processor_s - before_s)
    bodies = [(number, in_json(codec.decode(body))) for number, body in load.kept]
    compare((server,), cycles, structs.replace(load, kept=bodies))
    return load


def in_json(answer: Any) -> bytes:
    """An answer as it would come over HTTP."""
    return HEAD_END + msgspec.json.encode(answer)


def processor_s(servers: Sequence[ServerProcess]) -> float:
    """Processor time of servers together, so far."""
    return sum(each.processor_s for each in servers)


def cycled_by_client(server: ServerProcess, cycles: Sequence[Cycle], concurrency: int) -> Load:
    """The same as our client does it: bookings at once, progress and ends in batches."""
    generator = ClientGenerator(server.address, cycles, concurrency)
    before_s = server.processor_s
    try:
        load = generator.run_all()
    finally:
        generator.close()
    load = structs.replace(load, processor_s=server.processor_s - before_s)
    compare((server,), cycles, load)
    for answer in generator.reports:
        results = msgspec.json.decode(body_of(answer))["results"]
        if refused := [each for each in results if each["status"] >= 300]:
            raise ValueError(f"{server.name}: {len(refused)} steps refused: {refused[0]}")
    return load


class ClientGenerator(Generator):
    """Each booking's first token and end are reported once it is booked, in batches.

    As in `router.client.progress_reports`, one batch is on its way at a time, over a connection of
    its own, and is sent `EVERY_S` after there is something to report.
    """

    def __init__(self, address: Address, cycles: Sequence[Cycle], concurrency: int) -> None:
        super().__init__((address,), concurrency)
        self._cycles = cycles
        self._steps = [client_steps(each.request_id) for each in cycles]
        self._waiting: list[bytes] = []
        self._due_s = math.inf
        self._reporter = Connection(address)
        self.add(self._reporter)
        self.reports: list[bytes] = []

    def run_all(self) -> Load:
        """Until every end is reported."""
        start_s = time.perf_counter()
        load = self.run([each.script for each in self._cycles], keep_every=_every(self._cycles))
        while self._waiting or self._reporter.script:
            self.receive(PATIENCE_S)
        return structs.replace(load, seconds=time.perf_counter() - start_s)

    def receive(self, timeout_s: float) -> None:
        left_s = self._due_s - time.perf_counter()
        if left_s <= 0:
            self._report()
        super().receive(min(timeout_s, max(left_s, 0.0)))

    def answered(self, connection: Connection, answer: bytes, now_s: float) -> None:
        if connection is self._reporter:
            self.reports.append(answer)
            connection.script = ()
            self._due_s = now_s + EVERY_S if self._waiting else math.inf
            return
        self._waiting.append(self._steps[connection.number])
        if self._due_s == math.inf and not self._reporter.script:
            self._due_s = now_s + EVERY_S
        super().answered(connection, answer, now_s)

    def _report(self) -> None:
        batch = client_report(self._waiting[: MAX_STEPS // 2])
        del self._waiting[: MAX_STEPS // 2]
        self._due_s = math.inf
        self._reporter.script = ((batch,),)
        self.send(self._reporter, time.perf_counter())


def client_booking(request_id: str, request: SelectRequest) -> bytes:
    """The bytes with which `RouterClient` books."""
    question = Question(SELECT_AND_RESERVE, received_fields(request), request_id)
    body = encoded(question)
    path = f"{question.path}?{urlencode(body.parameters)}"
    headers = ((b"content-type", body.media_type.encode()), (b"x-request-id", request_id.encode()))
    return Request("POST", path, body.content, headers).encoded(ORIGIN)


def client_steps(request_id: str) -> bytes:
    """What it says of a request's first token and end, as items of a batch."""
    steps = [{"step": name, "request_id": request_id} for name in ("prefill_complete", "free")]
    return msgspec.json.encode(steps)[1:-1]


def client_report(steps: Sequence[bytes]) -> bytes:
    """The bytes of a batch."""
    body = b'{"steps":[' + b",".join(steps) + b'],"at_once":true}'
    headers = ((b"content-type", b"application/json"),)
    return Request("POST", REPORT.path, body, headers).encoded(ORIGIN)


def _every(cycles: Sequence[Cycle]) -> int:
    return max(1, len(cycles) // KEPT)


def body_of(answer: bytes) -> bytes:
    """An answer without its head."""
    return answer[answer.index(HEAD_END) + len(HEAD_END) :]


def compare(servers: Sequence[ServerProcess], cycles: Sequence[Cycle], load: Load) -> None:
    """Raise ValueError for a refusal, a wrong answer among those kept, or a booking left."""
    name = servers[0].name
    if load.refusals:
        raise ValueError(f"{name}: {len(load.refusals)} refused: {load.refusals[0].answer!r}")
    for number, answer in load.kept:
        if problem := wrong(cycles[number], body_of(answer)):
            raise ValueError(f"{name}: {problem}")
    for server in servers:
        expect_no_bookings(server, patience_s=HEARD_S if len(servers) > 1 else 0.0)


def wrong(cycle: Cycle, body: bytes) -> str:
    """What is wrong with the answer to a booking; empty if it is right.

    The rank may be another than the holder, but has to hold what the answer credits it with.
    """
    answer = msgspec.json.decode(body)
    held_tokens = cycle.held_tokens if answer["worker_id"] == cycle.holder else 0
    claimed_tokens = answer["overlap"]["gpu"]
    if answer["selection_id"] != cycle.request_id:
        return f"{cycle.request_id} was answered as {answer['selection_id']}"
    if claimed_tokens != held_tokens:
        rank = f"worker {answer['worker_id']}"
        return f"{rank} holds {held_tokens} tokens, the answer claims {claimed_tokens}"
    to_compute = answer["isl_tokens"] - held_tokens
    if answer["effective_prefill_tokens"] != to_compute:
        return f"{to_compute} tokens are to be computed, not {answer['effective_prefill_tokens']}"
    return ""


def expect_no_bookings(server: ServerProcess, patience_s: float) -> None:
    """Raise ValueError if a rank still has a booking after that time, and the last end."""
    until_s = time.monotonic() + patience_s
    with server.client() as client:
        while left := list(bookings_left(client.get("/loads").raise_for_status().json())):
            if time.monotonic() > until_s:
                raise ValueError(f"{server.name}: bookings are left: {left[:3]}")
            time.sleep(0.05)


def bookings_left(scopes: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """The ranks of a reply to GET /loads that have any load."""
    names = ("active_requests", "potential_prefill_tokens", "potential_decode_blocks")
    for scope in scopes:
        for rank in scope["loads"]:
            if any(rank[name] for name in names):
                yield rank
