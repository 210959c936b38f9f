"""From an engine's socket into the index of a router process on one core, hashing included.

An engine publishes everything at once, in batches of 8 events of 16 blocks, tokens and all; a block
counts once the router's answers credit it: the one stored last is asked for until it does.
`stored and removed`: the engine's pool is full, so that each block stored removes another, with one
event for each; pairs are counted. Beside it, as the plain alternative: the same payloads decoded by
msgspec into a set, on the same core.

`peer`: the same bytes into Dynamo's selection service, the two in turn on the same core.

`busy` counts the router's own seconds alone: on a machine that does other things, too,
it says what a free core would do, and nothing about waiting.
"""

import time
from collections.abc import Callable
from concurrent.futures import Executor
from statistics import median

import zmq
from direct_router import DirectRouter, running_peer
from direct_scale import DirectScale
from events_engine import BLOCK_SIZE, SETTLE_S, STOP, Traffic, last_path, run_engine
from events_processes import READER_CORE, free_port, process_anywhere, process_on
from events_zmq import FULL, GOAL_PAIRS, GOAL_STORED, PATIENCE_S, ROOMY, plain_s
from rows import Row
from timing import Bounded, alternate

from router.sequence.hashing.block_hashes import TokenArray, token_array

POLL_S = 0.02
REPORTED_S = 5.0
PEER_ROUNDS = 5
BEYOND_US = 2e6
"""Blocks a second, more than is possible."""


def ingest_rows(router: DirectRouter, scale: DirectScale) -> list[Row]:
    """Million blocks, or pairs of one stored and one removed, a second."""
    with process_anywhere() as engine, process_on(READER_CORE) as reader:
        rows = []
        for name, pool_blocks, goal in (
            ("stored", ROOMY, GOAL_STORED),
            ("stored and removed", FULL, GOAL_PAIRS),
        ):
            rows += _rows(name, router, engine, reader, pool_blocks, goal, scale)
        return rows


def _rows(
    name: str,
    router: DirectRouter,
    engine: Executor,
    reader: Executor,
    pool_blocks: int,
    goal: float,
    scale: DirectScale,
) -> list[Row]:
    traffic = Traffic(_endpoint(), _endpoint(), scale.engine_batches, pool_blocks)
    last = token_array(engine.submit(last_path, traffic).result())
    seconds = [_ours_s(router, engine, traffic, last) for _ in range(scale.rounds + 1)][1:]
    plain = traffic.blocks / median(
        [reader.submit(plain_s, traffic).result() for _ in range(scale.rounds)]
    )
    walls, processors = (traffic.blocks / median(times) for times in zip(*seconds, strict=True))
    return [
        Bounded(label, rate / 1e6, plain / 1e6, "M/s", goal, lower=False)
        for label, rate in ((name, walls), (f"{name}, busy", processors))
    ]


def peer_rows(router: DirectRouter, scale: DirectScale) -> list[Row]:
    """Million blocks a second, of the same bytes: ours and Dynamo's selection service.

    Always in five rounds, as the two stand beside each other.
    """
    traffic = Traffic(_endpoint(), _endpoint(), scale.engine_batches, ROOMY)
    with process_anywhere() as engine, running_peer() as peer:
        last = token_array(engine.submit(last_path, traffic).result())
        sides = [
            lambda _: _ours_s(router, engine, traffic, last),
            lambda _: _followed_s(peer, engine, traffic, last),
        ]
        ours, theirs = alternate(sides, PEER_ROUNDS, warm_up=True)
    return [
        Row(name, *(traffic.blocks / 1e6 / median(times) for times in pair), "M/s", 1, lower=False)
        for name, pair in zip(
            ("stored", "stored, busy"),
            zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True),
            strict=True,
        )
    ]


def _endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def _ours_s(
    router: DirectRouter, engine: Executor, traffic: Traffic, last: TokenArray
) -> tuple[float, float]:
    """Seconds, and processor seconds of our router, until all of it is in the index; counted."""
    return _followed_s(router, engine, traffic, last, lambda: _require_all(router, traffic))


def _followed_s(
    router: DirectRouter,
    engine: Executor,
    traffic: Traffic,
    last: TokenArray,
    check: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    """Seconds, and processor seconds of a router, until it credits the prompt stored last."""
    running = engine.submit(run_engine, traffic)
    num_blocks = min(2 * traffic.pool_blocks, traffic.blocks)
    router.register(0, traffic.events_endpoint, traffic.replay_endpoint, BLOCK_SIZE, num_blocks)
    _begin(traffic)
    try:
        looks = _look_until_held(router, traffic, last)
        check()
    finally:
        _stop(traffic)
        router.remove(0)
    start_s, (end_s, end_processor_s) = running.result(), looks[-1]
    processor_s = max(processor_s for look_s, processor_s in looks if look_s <= start_s)
    return end_s - start_s, end_processor_s - processor_s


def _look_until_held(
    router: DirectRouter, traffic: Traffic, last: TokenArray
) -> list[tuple[float, float]]:
    """Ask for the block stored last until it is found; but not before it can be, as answers take
    the router's time. Moments, each with its processor time; the last is when it had been found.
    """
    since_s = time.monotonic()
    earliest_s = since_s + SETTLE_S + traffic.blocks / BEYOND_US
    looks = []
    while True:
        looks.append((time.monotonic(), router.processor_s))
        if looks[-1][0] >= earliest_s and router.holds(0, last, BLOCK_SIZE):
            return [*looks, (time.monotonic(), router.processor_s)]
        if looks[-1][0] > since_s + PATIENCE_S:
            raise RuntimeError("the last block does not get into the index")
        time.sleep(POLL_S)


def _require_all(router: DirectRouter, traffic: Traffic) -> None:
    """An engine's events are applied in order, so all are there if the last one is; counts follow
    with the next report.
    """
    expected = (min(traffic.blocks, traffic.pool_blocks), traffic.blocks)
    until_s = time.monotonic() + REPORTED_S
    while (counted := _counted(router)) != expected:
        if time.monotonic() > until_s:
            raise RuntimeError(f"held and stored are {counted}, and should be {expected}")
        time.sleep(POLL_S)


def _counted(router: DirectRouter) -> tuple[float, float]:
    return (
        router.total("kv_router_worker_held_blocks"),
        router.total("kv_engine_normalized_total", outcome="stored"),
    )


def _stop(traffic: Traffic) -> None:
    _send(traffic, STOP)


def _begin(traffic: Traffic) -> None:
    """Ask for a replay in place of a follower that does so after a gap alone."""
    _send(traffic, (0).to_bytes(8, "big"))


def _send(traffic: Traffic, message: bytes) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(traffic.replay_endpoint)
        socket.send_multipart([b"", message])
        time.sleep(0.1)
