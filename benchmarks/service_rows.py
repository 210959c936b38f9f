"""Rows of the comparison of two services."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from statistics import median
from typing import Self

import msgspec
from events_processes import pin
from rows import Row
from service_load import Load, percentile, repeated, request, run_load
from service_servers import GENERATOR_CORE, ServerProcess, our_server, peer_server
from service_world import MODEL, WORKERS, Tokens, World, running_world
from timing import Quicker, alternate

JSON_GOALS = {512: 0.9, 8_192: 2.0, 100_000: 2.5}
BINARY_GOALS = {512: 1.1, 8_192: 5.0, 100_000: 10.0}
ALONE_GOALS = {512: 1 / 1.2, 8_192: 1.0, 100_000: 1.0}
"""How many times as long the peer has to take, at least."""

REQUESTS = {512: 20_000, 8_192: 4_000, 100_000: 400}
ALONE_REQUESTS = {512: 4_000, 8_192: 2_000, 100_000: 300}
CONCURRENCIES = (1, 16, 64)
GOAL_CONCURRENCY = 16
QUERY = "model_name=m&routing_group=g"


class ServiceScale:
    """How much is measured: all of it, or what ends within 45 s."""

    def __init__(self, quick: bool) -> None:
        self.rounds = 5
        self.share = 0.05 if quick else 1.0
        self.concurrencies = (GOAL_CONCURRENCY,) if quick else CONCURRENCIES
        self.is_quick = quick

    def count(self, requests: int) -> int:
        return max(20, int(requests * self.share))

    def __str__(self) -> str:
        return f"medians of {self.rounds} interleaved rounds{', short' if self.is_quick else ''}"


class Servers:
    """Both, each started when first asked for, and the engines that tell them what they hold."""

    def __init__(self, workers: int = WORKERS) -> None:
        self._workers = workers
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        pin(GENERATOR_CORE)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @cached_property
    def world(self) -> World:
        return self._stack.enter_context(running_world(self._workers))

    @cached_property
    def ours(self) -> ServerProcess:
        return self._started(our_server())

    @cached_property
    def peer(self) -> ServerProcess:
        return self._started(peer_server())

    def _started(self, server: AbstractContextManager[ServerProcess]) -> ServerProcess:
        started = self._stack.enter_context(server)
        self.world.register(started)
        return started

    def json(self, tokens: int) -> list[bytes]:
        """A request for each prompt of that length."""
        return [_json_request(prompt) for prompt in self.world.prompts[tokens]]

    def binary(self, tokens: int) -> list[bytes]:
        """The same with packed tokens."""
        return [_binary_request(prompt) for prompt in self.world.prompts[tokens]]


def json_rows(servers: Servers, scale: ServiceScale) -> list[Row]:
    return _rate_rows(servers, scale, servers.json, JSON_GOALS)


def binary_rows(servers: Servers, scale: ServiceScale) -> list[Row]:
    return _rate_rows(servers, scale, servers.binary, BINARY_GOALS)


def alone_rows(servers: Servers, scale: ServiceScale) -> list[Row]:
    rows: list[Row] = []
    for tokens, goal in ALONE_GOALS.items():
        requests, count = servers.json(tokens), scale.count(ALONE_REQUESTS[tokens])
        ours, peer = _loads(servers, (requests, requests), 1, count, scale.rounds)
        for label, figure in (("p50", 0.5), ("p99", 0.99)):
            times = [
                1e6 * median(percentile(load.latencies_s[0], figure) for load in side)
                for side in (ours, peer)
            ]
            least = goal if figure > 0.5 else 0.0
            rows.append(Quicker(f"{tokens}, {label}", *times, "µs", least, lower=False))
    return rows


def _rate_rows(
    servers: Servers,
    scale: ServiceScale,
    requests_of: Callable[[int], list[bytes]],
    goals: dict[int, float],
) -> list[Row]:
    rows = []
    for tokens, goal in goals.items():
        sides = (requests_of(tokens), servers.json(tokens))
        count = scale.count(REQUESTS[tokens])
        for concurrency in scale.concurrencies:
            loads = _loads(servers, sides, concurrency, count, scale.rounds)
            rates = [median(load.per_s for load in side) for side in loads]
            least = goal if concurrency == GOAL_CONCURRENCY else 0.0
            name = f"{tokens}, {concurrency} at once"
            rows.append(Row(name, *rates, "1/s", least, lower=False))
            if concurrency == GOAL_CONCURRENCY:
                rows.append(_processor_row(f"{tokens}, of a core's time", loads, goal))
    return rows


def _processor_row(name: str, loads: Sequence[Sequence[Load]], goal: float) -> Row:
    """What each request took of the core: on a busy machine the better figure."""
    times = [median(load.processor_s_each for load in side) * 1e6 for side in loads]
    return Quicker(name, *times, "µs", goal, lower=False)


def _loads(
    servers: Servers,
    requests: tuple[Sequence[bytes], Sequence[bytes]],
    concurrency: int,
    count: int,
    rounds: int,
) -> list[list[Load]]:
    pairs = zip((servers.ours, servers.peer), requests, strict=True)
    sides = [_side(server, asked, concurrency, count) for server, asked in pairs]
    return alternate(sides, rounds, warm_up=True)


def _side(
    server: ServerProcess, requests: Sequence[bytes], concurrency: int, count: int
) -> Callable[[int], Load]:
    def measure(_: int) -> Load:
        before_s = server.processor_s
        load = _checked(run_load((server.address,), repeated(requests, count), concurrency))
        return msgspec.structs.replace(load, processor_s=server.processor_s - before_s)

    return measure


def _checked(load: Load) -> Load:
    if load.refusals:
        raise RuntimeError(f"{len(load.refusals)} requests failed: {load.refusals[0].answer!r}")
    return load


def _json_request(prompt: Tokens) -> bytes:
    body = {"token_ids": prompt.tolist(), **MODEL}
    return request("/select", msgspec.json.encode(body), "application/json")


def _binary_request(prompt: Tokens) -> bytes:
    return request(f"/select?{QUERY}", prompt.astype("<u4").tobytes(), "application/octet-stream")
