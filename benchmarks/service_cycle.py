"""Cycles: a booking, its first token and its end, as bytes made before the clock starts.

Every cycle has an id of its own. Three quarters of its prompt are held by a worker, the rest is new.
What a server answered is compared with what the fleet holds, after the clock has stopped.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count as numbers
from random import Random
from typing import Any, Literal, TypeAlias
from uuid import UUID

import msgspec
import numpy as np
from msgspec import Struct, structs
from service_load import HEAD_END, Load, Script, bare_request, request_head, run_load
from service_servers import ServerProcess
from service_world import BLOCK_SIZE, MODEL, World

CALLS = ("select_and_reserve", "prefill_complete", "free")
SHARED = 0.75
KEPT = 200
"""At least so many answers of a round are compared, if it has as many."""

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

    def prompts(self, count: int) -> list[bytes]:
        """Arrays of token ids alone, in JSON."""
        return [self._prompt(next(self._numbers)) for _ in range(count)]

    def packed(self, count: int) -> list[tuple[str, bytes]]:
        """Ids, and tokens as packed little-endian u32."""
        made = []
        for _ in range(count):
            shared = self._prompt_held(next(self._numbers))[: self._shared_tokens]
            tokens = np.concatenate([shared, self._tail()]).astype("<u4")
            made.append((self._id(), tokens.tobytes()))
        return made

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
        held_tokens = 0 if form.is_salted else self._shared_tokens // BLOCK_SIZE * BLOCK_SIZE
        holder = self._world.holder(self.tokens, number)
        return Cycle(request_id, holder, held_tokens, script)

    def _prompt(self, number: int) -> bytes:
        tail = msgspec.json.encode(self._tail().tolist())
        return self._shared[number % len(self._shared)] + tail[1:]

    def _prompt_held(self, number: int) -> Any:
        prompts = self._world.prompts[self.tokens]
        return prompts[number % len(prompts)]

    def _tail(self) -> Any:
        return self._tails.integers(0, 100_000, self.tokens - self._shared_tokens, dtype=np.uint32)

    def _id(self) -> str:
        return str(UUID(int=self._ids.getrandbits(128), version=4))


def cycled(
    server: ServerProcess, cycles: Sequence[Cycle], concurrency: int, per_s: float | None = None
) -> Load:
    """Run cycles, and compare what was answered. Raises ValueError for a wrong answer."""
    scripts = [each.script for each in cycles]
    every = max(1, len(cycles) // KEPT)
    before_s = server.processor_s
    if per_s is None:
        load = run_load(server.port, scripts, concurrency, keep_every=every)
    else:
        load = run_load(server.port, scripts, concurrency, per_s=per_s, keep_every=every)
    load = structs.replace(load, processor_s=server.processor_s - before_s)
    if load.refusals:
        raise ValueError(f"{server.name}: {len(load.refusals)} refused: {load.refusals[0]}")
    for number, answer in load.kept:
        if problem := wrong(cycles[number], answer[answer.index(HEAD_END) + len(HEAD_END) :]):
            raise ValueError(f"{server.name}: {problem}")
    expect_no_bookings(server)
    return load


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


def expect_no_bookings(server: ServerProcess) -> None:
    """Raise ValueError if a rank still has a booking."""
    with server.client() as client:
        left = list(bookings_left(client.get("/loads").raise_for_status().json()))
    if left:
        raise ValueError(f"{server.name}: bookings are left after the last end: {left[:3]}")


def bookings_left(scopes: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """The ranks of a reply to GET /loads that have any load."""
    names = ("active_requests", "potential_prefill_tokens", "potential_decode_blocks")
    for scope in scopes:
        for rank in scope["loads"]:
            if any(rank[name] for name in names):
                yield rank
