"""Exchanges recorded of the selection service that this router stands in for, all of them.

Same status, at least the same fields, and where they do not depend on chance the same values. What
differs is listed here, and in the README beside `router/http`.
"""

import json
from pathlib import Path

import pytest

from support.engines.zmq_engines import stored
from support.fleets.direct import DirectRouter
from support.fleets.recorded_engines import RecordedEngines
from support.processes.servers import equals

VECTORS = Path(__file__).parents[3] / "vectors" / "selection_service_examples.json"
EXCHANGES = json.loads(VECTORS.read_text())
SECOND_STATE = next(i for i, each in enumerate(EXCHANGES) if "second state" in each["note"])

SCOPE = {"model_name": "m", "routing_group": "g"}
HELD = {(1, 0): 10}
"""The first engine of the recording published ten blocks of 16 tokens, 1 to 160."""

BY_CHANCE = {
    "select, another prompt": set(),
    "empty tokens": set(),
    "hashes instead of tokens": set(),
    "allowed workers": set(),
    "override": {"overlap", "effective_prefill_tokens"},
}
"""Where either service draws, among equals or by temperature; and what depends on that beside where
the request goes.
"""

DIFFERENT = {
    "metrics": 200,  # theirs has none
}
"""Statuses that are not those recorded."""

OTHER_PATHS = {
    "/ready": "/ready?verbose",  # ours lists workers only then, and only to operators
}
"""Paths that return all the recorded fields."""

OTHER_NAMES = {
    "dump": {"event_id", "block_hash", "tokens_hash"},
}
"""Values that mean something else: our event ids are the log's, our block hashes are the sequence
hashes, and no local hashes are kept.
"""


def answered(said, recorded, path=""):
    """Every recorded field is there, and of its kind."""
    if isinstance(recorded, dict):
        assert recorded.keys() <= said.keys(), (path, recorded.keys() - said.keys())
        for name, value in recorded.items():
            answered(said[name], value, f"{path}.{name}")
    elif isinstance(recorded, list):
        assert isinstance(said, list), path
        for value in recorded[:1]:
            assert said, path
            answered(said[0], value, f"{path}[0]")
    elif recorded is not None and said is not None:
        assert isinstance(said, type(recorded)), (path, said, recorded)


def by_worker(value):
    """Lists of workers and ranks in one order; theirs is that of a hash table."""
    if isinstance(value, list):
        rows = [by_worker(each) for each in value]
        ids = ("worker_id", "dp_rank")
        if all(isinstance(row, dict) and "worker_id" in row for row in rows):
            return sorted(rows, key=lambda row: [row.get(name, 0) for name in ids])
        return rows
    if isinstance(value, dict):
        return {name: by_worker(each) for name, each in value.items()}
    return value


def same_values(said, recorded, skip):
    """The recorded fields have the recorded values, but for those to be skipped."""
    if isinstance(recorded, dict):
        for name in recorded.keys() - skip:
            same_values(said[name], recorded[name], skip)
    elif isinstance(recorded, list):
        assert len(said) == len(recorded)
        for ours, theirs in zip(said, recorded, strict=True):
            same_values(ours, theirs, skip)
    else:
        assert said == recorded


def sent(exchange, engines):
    """The recorded request, as arguments; the engines' sockets are others here."""
    body = exchange["request"]
    if exchange["note"] == "broken JSON":
        return {"content": b'{"model_name":', "headers": {"content-type": "application/json"}}
    if exchange["note"] == "wrong content type":
        return {"content": b'{"model_name": "m"}', "headers": {"content-type": "text/plain"}}
    if body is None:
        return {}
    text = engines.live(json.dumps(body))
    return {"content": text, "headers": {"content-type": "application/json"}}


async def is_connected(router):
    engine = (await router.view(1))["ranks"][0]["engine"]
    return engine is not None and engine["condition"] == "blind"


async def check(router, exchange, engines):
    note = exchange["note"]
    path = OTHER_PATHS.get(exchange["path"], exchange["path"])
    answer = await router.client.request(exchange["method"], path, **sent(exchange, engines))
    assert answer.status_code == DIFFERENT.get(note, exchange["status"]), answer.text
    if answer.headers["content-type"] != "application/json":
        return
    text = engines.recorded(answer.text)
    said, recorded = by_worker(json.loads(text)), by_worker(exchange["response"])
    answered(said, recorded)
    skip = {"error", *OTHER_NAMES.get(note, ())}
    if note in BY_CHANCE:
        skip |= {"worker_id", "dp_rank", "endpoint", "dp", *BY_CHANCE[note]}
    same_values(said, recorded, skip)


@pytest.fixture
async def router():
    async with DirectRouter(check_workers=False).running() as router:
        yield router


async def test_every_recorded_exchange_is_answered_alike(router, eventually):
    with RecordedEngines() as engines:
        for exchange in EXCHANGES[:SECOND_STATE]:
            await check(router, exchange, engines)
            if exchange["note"] == "register":
                blocks = list(range(101, 111))
                await eventually(lambda: is_connected(router))
                engines.first.publish(stored(blocks, list(range(1, 161)), block_size=16))
                await eventually(lambda: equals(router.overlaps(range(1, 161), **SCOPE), HELD))


async def test_a_recorded_selection_becomes_a_reservation(router):
    register = next(each for each in EXCHANGES if each["note"] == "register")
    with RecordedEngines() as engines:
        for exchange in (register, *EXCHANGES[SECOND_STATE:]):
            await check(router, exchange, engines)
