"""Cycles at their limits: while events come, with a thousand workers, beyond the most, for long.
And what else callers ask: explained bookings, cached prefixes, readiness.
"""

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
from events_processes import running_server
from msgspec import structs
from rows import Row
from service_cycle import (
    PLAIN,
    Cycles,
    Form,
    body_of,
    cycled,
    expect_no_bookings,
)
from service_features import TOKEN, with_tokens
from service_feed import FULL, ROOMY, fed_by_agent, fed_by_engine
from service_load import (
    Generator,
    Load,
    bare_request,
    percentile,
    repeated,
    request,
    run_load,
)
from service_rows import GOAL_CONCURRENCY, Servers, ServiceScale, processor_row, rate_row
from service_servers import ServerProcess, our_server
from service_world import BLOCK_SIZE, MODEL
from timing import Bounded, alternate

EXPLAIN_CYCLES, EXPLAIN_CHUNK, EXPLAIN_GOAL = 2_048, 128, 5.0
OVERLAPS, OVERLAP_GOALS = {512: 6_000, 8_192: 1_500}, {512: 1.0, 8_192: 3.0}
READY, READY_GOAL = 10_000, 5_000
MANY_WORKERS, FLEET_CYCLES, FLEET_GOAL = 1_024, 3_000, 0.5
INGEST_TOKENS, INGEST_GOAL_MS, INGEST_S, QUICK_INGEST_S = 8_192, 5.0, 10.0, 2.0
OVERLOAD, OVERLOAD_S, QUICK_OVERLOAD_S, REST_S = 1.5, 60.0, 5.0, 2.0
OVERLOAD_CONNECTIONS, ADMITTED_GOAL_MS, REFUSED_GOAL_MS, RECOVERED_GOAL = 1_024, 100.0, 10.0, 0.95
SOAK_SHARE, SOAK_SLICE_S, SOAK_GROWTH = 0.8, 10.0, 1.02
MOST_CYCLES = 20_000
"""Cycles of the rounds whose rate counts as the most."""

EXPLAINED = Form(fields=lambda _: {"explain": True})


def query_rows(servers: Servers, scale: ServiceScale) -> list[Row]:
    """Explained bookings, cached prefixes of the whole fleet, and readiness."""
    rows = _explain_rows(servers, scale)
    for tokens, goal in OVERLAP_GOALS.items():
        rows += _overlap_rows(servers, scale, tokens, goal)
    rows.append(_ready_row(servers, scale, [servers.peer]))
    with Servers(MANY_WORKERS) as many:
        rows.append(_ready_row(many, scale, []))
    return rows


def _explain_rows(servers: Servers, scale: ServiceScale) -> list[Row]:
    """Of bookings alone: they are ended outside of what is measured."""
    cycles, count = Cycles(servers.world, 512), scale.count(EXPLAIN_CYCLES)
    sides = [_bookings(servers.ours, cycles, count, form) for form in (EXPLAINED, PLAIN)]
    times = [1e6 * median(each) for each in alternate(sides, scale.rounds, warm_up=True)]
    return [Row("512, explained booking, of a core", *times, "µs", EXPLAIN_GOAL, lower=True)]


def _bookings(
    server: ServerProcess, cycles: Cycles, count: int, form: Form
) -> Callable[[int], float]:
    """Seconds of the server's core for each booking."""

    def measure(_: int) -> float:
        spent_s = 0.0
        for _ in range(math.ceil(count / EXPLAIN_CHUNK)):
            made = cycles.made(EXPLAIN_CHUNK, form)
            before_s = server.processor_s
            _run(server, [each.script[:1] for each in made])
            spent_s += server.processor_s - before_s
            _run(server, [each.script[1:] for each in made])
        expect_no_bookings(server, 0.0)
        return spent_s / math.ceil(count / EXPLAIN_CHUNK) / EXPLAIN_CHUNK

    return measure


def _run(
    server: ServerProcess, scripts: Sequence[tuple[tuple[bytes, ...], ...]], keep_every: int = 0
) -> Load:
    """Raises ValueError for a refusal."""
    before_s = server.processor_s
    load = run_load((server.address,), scripts, GOAL_CONCURRENCY, keep_every=keep_every)
    if load.refusals:
        raise ValueError(f"{server.name}: {len(load.refusals)} refused: {load.refusals[0]}")
    return structs.replace(load, processor_s=server.processor_s - before_s)


def _overlap_rows(servers: Servers, scale: ServiceScale, tokens: int, goal: float) -> list[Row]:
    """Every prompt is held whole by its worker, which both have to know."""
    prompts = servers.world.prompts[tokens]
    asked = [
        request("/overlap_scores", msgspec.json.encode(body), "application/json")
        for body in ({"token_ids": prompt.tolist(), **MODEL} for prompt in prompts)
    ]
    count = scale.count(OVERLAPS[tokens])

    def side(server: ServerProcess) -> Callable[[int], Load]:
        def measure(_: int) -> Load:
            load = _run(server, repeated(asked, count), keep_every=50)
            for number, answer in load.kept:
                _expect_held(server, servers.world.holder(tokens, number), tokens, answer)
            return load

        return measure

    sides = [side(servers.ours), side(servers.peer)]
    loads = alternate(sides, scale.rounds, warm_up=True)
    name = f"{tokens}, /overlap_scores, {GOAL_CONCURRENCY} at once"
    return [rate_row(name, loads, goal), processor_row(f"{name}, of a core", loads, goal)]


def _expect_held(server: ServerProcess, holder: int, tokens: int, answer: bytes) -> None:
    """Raise ValueError unless the holder, and no other, holds the whole prompt."""
    workers = msgspec.json.decode(body_of(answer))["workers"]
    held = {each["worker_id"]: each["device_blocks"] for each in workers}
    if any(
        blocks != (tokens // BLOCK_SIZE) * (worker_id == holder)
        for worker_id, blocks in held.items()
    ):
        raise ValueError(f"{server.name}: worker {holder} holds {tokens} tokens, not {held}")


def _ready_row(servers: Servers, scale: ServiceScale, peers: Sequence[ServerProcess]) -> Row:
    """With a token; beside a peer's rate, or the goal alone."""
    headers = f"authorization: Bearer {TOKEN}\r\n"
    scripts = repeated([bare_request("GET", "/ready", headers)], scale.count(READY))
    workers = servers.world.workers
    with (
        tempfile.TemporaryDirectory() as folder,
        with_tokens(servers.world, Path(folder)) as routers,
    ):
        sides = [partial(_run, each) for each in (*routers, *peers)]
        loads = alternate([lambda _, s=s: s(scripts) for s in sides], scale.rounds, warm_up=True)
    rates = [median(load.per_s for load in side) for side in loads]
    name = f"/ready, {workers} workers, {GOAL_CONCURRENCY} at once"
    return Bounded(name, rates[0], rates[-1] if peers else READY_GOAL, "1/s", READY_GOAL, False)


def fleet_rows(servers: Servers, scale: ServiceScale) -> list[Row]:
    """A fleet of many workers, beside that of 16, before and after: idle, the router of the many
    takes much of the core that they share.
    """
    count = scale.count(FLEET_CYCLES)
    few = partial(_rounds, servers, count, scale.rounds)
    before = few()
    with Servers(MANY_WORKERS) as many:
        found = _rounds(many, count, scale.rounds)
    loads = [found, before + few()]
    name = f"512, {MANY_WORKERS:,} workers, {GOAL_CONCURRENCY} at once"
    return [
        rate_row(name, loads, FLEET_GOAL),
        processor_row(f"{name}, of a core", loads, FLEET_GOAL),
    ]


def _rounds(servers: Servers, count: int, rounds: int) -> list[Load]:
    """Without the first one, which warms up."""
    cycles = Cycles(servers.world, 512)
    side = partial(cycled, (servers.ours,), concurrency=GOAL_CONCURRENCY)
    return [side(cycles.made(count)) for _ in range(rounds + 1)][1:]


def ingest_rows(servers: Servers, scale: ServiceScale) -> list[Row]:
    """Events by an agent over JetStream, which is how routers are deployed; then from an engine's
    own socket, where the service decodes, hashes and names all blocks itself. Either has room for
    more at first, and then a full pool.
    """
    with running_server() as nats, our_server("--nats-url", nats.url) as on_bus:
        servers.world.register(on_bus)
        rows = _ingest_rows("an agent", servers, on_bus, partial(fed_by_agent, nats.url), scale)
    by_engine = partial(fed_by_engine, servers.ours.url)
    return rows + _ingest_rows("an engine", servers, servers.ours, by_engine, scale)


def _ingest_rows(
    by: str,
    servers: Servers,
    server: ServerProcess,
    feed: Callable[[int], AbstractContextManager[Callable[[], float]]],
    scale: ServiceScale,
) -> list[Row]:
    cycles = Cycles(servers.world, INGEST_TOKENS)
    per_s = _most_per_s(server, cycles, scale.count(MOST_CYCLES) // 10, GOAL_CONCURRENCY) / 2
    count = int(per_s * (QUICK_INGEST_S if scale.is_quick else INGEST_S))
    rows: list[Row] = []
    for change, pool_blocks in (("stored", ROOMY), ("stored and removed", FULL)):
        made = cycles.made(count)
        with feed(pool_blocks) as rate:
            load = cycled((server,), made, GOAL_CONCURRENCY, per_s)
            events = f"{rate() / 1e3:.0f} k blocks/s {change} by {by}"
        name = f"{INGEST_TOKENS}, {per_s:.0f} cycles/s, p99 of a booking, {events}"
        p99_ms = load.p99_s() * 1e3
        rows.append(Bounded(name, p99_ms, INGEST_GOAL_MS, "ms", INGEST_GOAL_MS, lower=True))
    return rows


def _most_per_s(server: ServerProcess, cycles: Cycles, count: int, concurrency: int) -> float:
    """The most cycles a second; the first round warms up."""
    loads = [cycled((server,), cycles.made(count), concurrency) for _ in range(4)]
    return median(load.per_s for load in loads[1:])


def overload_rows(servers: Servers, scale: ServiceScale) -> list[Row]:
    """More cycles than it can carry out, asked for by callers who do not wait for each other.

    Their connections are open before: what is measured is the cycles alone.
    """
    server, cycles = servers.ours, Cycles(servers.world, 512)
    count = scale.count(MOST_CYCLES)
    most_per_s = _most_per_s(server, cycles, count, 64)
    per_s = OVERLOAD * most_per_s
    seconds = QUICK_OVERLOAD_S if scale.is_quick else OVERLOAD_S
    scripts = [each.script for each in cycles.made(int(per_s * seconds))]
    generator = Generator((server.address,), OVERLOAD_CONNECTIONS)
    try:
        generator.run([each.script for each in cycles.made(4 * OVERLOAD_CONNECTIONS)])
        load = generator.run(scripts, per_s)
    finally:
        generator.close()
    time.sleep(REST_S)
    expect_no_bookings(server, 0.0)
    after_per_s = median(cycled((server,), cycles.made(count), 64).per_s for _ in range(3))
    return [
        *_overloaded_rows(f"512, {OVERLOAD} × {most_per_s:,.0f} cycles/s", load, most_per_s),
        Row(f"512, {REST_S:.0f} s later", after_per_s, most_per_s, "1/s", RECOVERED_GOAL, False),
    ]


def _overloaded_rows(name: str, load: Load, most_per_s: float) -> list[Row]:
    """Raises ValueError if an answer is neither a success nor a refusal for want of capacity."""
    odd = [each for each in load.refusals if each.answer[9:12] not in (b"503", b"529")]
    if odd:
        raise ValueError(f"{len(odd)} wrong answers: {odd[0].answer!r}")
    refused_s = [each.latency_s for each in load.refusals if not each.step]
    refused_ms = 1e3 * percentile(refused_s, 0.99) if refused_s else 0.0
    ends = len(load.refusals) - len(refused_s)
    share = len(refused_s) / (len(refused_s) + len(load.latencies_s[0]))
    return [
        Row(f"{name}, carried out", load.per_s, most_per_s, "1/s", 0.0, lower=False),
        _at_most(f"{name}, p99 of an admitted booking", load.p99_s() * 1e3, ADMITTED_GOAL_MS),
        _at_most(f"{name}, p99 of the {share:.0%} refused", refused_ms, REFUSED_GOAL_MS),
        Bounded(f"{name}, first tokens and ends refused", ends, 1.0, "", 0.0, lower=True),
    ]


def _at_most(name: str, ours_ms: float, goal_ms: float) -> Row:
    return Bounded(name, ours_ms, goal_ms, "ms", goal_ms, lower=True)


def soaked(servers: Servers, seconds: float) -> int:
    """Hold ours at 80 % of its most; 0 if nothing failed and memory did not grow."""
    server, cycles = servers.ours, Cycles(servers.world, 512)
    per_s = SOAK_SHARE * _most_per_s(server, cycles, MOST_CYCLES // 2, GOAL_CONCURRENCY)
    end_s = time.monotonic() + seconds
    resident_bytes: list[int] = []
    count = int(per_s * SOAK_SLICE_S)
    while time.monotonic() < end_s:
        load = cycled((server,), cycles.made(count), GOAL_CONCURRENCY, per_s)
        resident_bytes.append(server.resident_bytes)
        memory = f"{resident_bytes[-1] / 1e6:.1f} MB"
        print(f"{load.per_s:,.0f}/s, p99 {load.p99_s() * 1e3:.2f} ms, {memory}", flush=True)
    settled, last = resident_bytes[len(resident_bytes) // 4], resident_bytes[-1]
    print(f"memory: {last / settled:.3f} times what it was after a quarter of the time")
    return 0 if last <= SOAK_GROWTH * settled else 1
