"""Decisions in a file."""

import asyncio
import json
import stat
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from router.core.commands import RemoveWorker, Select
from router.errors import ConfigError
from router.observability import decision_log
from router.observability.decision_log import DecisionLog
from router.protocol.requests import SelectRequest
from router.sequence.active.prompt import prepare
from support.values.builders import World, rank

PROMPT = [123_456_789, *range(40)]
SECRETS = {"token_ids": PROMPT, "cache_salt": "salty", "session_id": "whose", "lora_name": None}


@pytest.fixture
def world():
    world = World()
    for worker_id in range(1, 21):
        world.worker(worker_id, endpoint="http://user:password@w")
    world.cache(rank(3), PROMPT)
    return world


def place(world, **fields):
    request = SelectRequest(**{**SECRETS, **fields})
    return request, world.core.handle(Select(request, prepare(request, ())), 0.0)[0]


async def written(log):
    """Run it until all that waits is in the file."""
    task = asyncio.create_task(log.run())
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def logging(world, path, per_s=1000.0, max_bytes=1 << 20):
    clock = SimpleNamespace(now_s=0.0)
    return DecisionLog(world.core, path, per_s, max_bytes, lambda: clock.now_s), clock


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_line_explains_a_decision(world, tmp_path):
    path = tmp_path / "decisions.jsonl"
    log, _ = logging(world, path)
    log.take(*place(world, request_id="r1", allowed_worker_ids=[*range(2, 21)]))
    await written(log)
    (line,) = lines(path)
    assert (line["request_id"], line["policy"], line["isl_tokens"]) == ("r1", "dynamo-1.0", 41)
    assert line["candidates"] == 19
    assert len(line["shown"]) == 16
    assert line["shown"][0]["worker_id"] == line["worker_id"]
    assert sum(line["shown"][0]["parts"].values()) == line["cost"] == line["shown"][0]["cost"]
    assert line["removed"] == [{"filter": "allowed_worker_ids", "count": 1, "ranks": ["1.0"]}]
    assert line["settings"]["router_temperature"] == 0.0


async def test_decision_log_contains_no_secrets(world, tmp_path):
    path = tmp_path / "decisions.jsonl"
    log, _ = logging(world, path)
    log.take(*place(world))
    await written(log)
    text = path.read_text()
    assert not any(secret in text for secret in ("123456789", "salty", "whose", "password"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_lines_beyond_the_rate_are_skipped_and_counted(world, tmp_path):
    log, clock = logging(world, tmp_path / "d", per_s=4.0)
    decided = place(world)
    for step in range(1_000):
        clock.now_s = step * 0.01
        log.take(*decided)
    await written(log)
    assert (log.written, log.written + log.skipped) == (pytest.approx(44, abs=4), 1_000)


async def test_lines_beyond_the_queue_are_dropped_and_counted(world, tmp_path, monkeypatch):
    monkeypatch.setattr(decision_log, "QUEUE_DECISIONS", 3)
    log, clock = logging(world, tmp_path / "d")
    for _ in range(5):
        clock.now_s += 1.0
        log.take(*place(world))
    await written(log)
    assert (log.written, log.dropped) == (3, 2)


async def test_a_full_file_makes_room_for_the_next(world, tmp_path):
    path = tmp_path / "d"
    log, clock = logging(world, path, max_bytes=64 << 10)
    for number in range(30):
        clock.now_s += 1.0
        log.take(*place(world, request_id=f"r{number}"))
    await written(log)
    old, new = lines(tmp_path / "d.1"), lines(path)
    assert [int(line["request_id"][1:]) for line in (*old, *new)][-len(old) :][-1] == 29
    assert max(path.stat().st_size, (tmp_path / "d.1").stat().st_size) <= 64 << 10
    assert sorted(each.name for each in tmp_path.iterdir()) == ["d", "d.1"]


async def test_goes_on_in_the_file_of_an_earlier_life(world, tmp_path):
    for name in ("a", "b"):
        log, _ = logging(world, tmp_path / "d")
        log.take(*place(world, request_id=name))
        await written(log)
    assert [line["request_id"] for line in lines(tmp_path / "d")] == ["a", "b"]


async def test_a_worker_that_is_gone_meanwhile_is_explained_all_the_same(world, tmp_path):
    log, _ = logging(world, tmp_path / "d")
    log.take(*place(world))
    for worker_id in range(1, 21):
        world.core.handle(RemoveWorker(worker_id, "test"), 0.0)
    await written(log)
    (line,) = lines(tmp_path / "d")
    assert line["shown"][0]["trust"]["reason"] == "gone"


def test_a_file_that_cannot_be_written_is_refused_at_start(world, tmp_path):
    with pytest.raises(ConfigError) as caught:
        logging(world, tmp_path / "nowhere" / "d")
    assert caught.value.key == "decision_log"


async def test_a_disk_that_takes_no_more_is_counted(world):
    log, _ = logging(world, Path("/dev/full"))
    log.take(*place(world))
    await written(log)
    assert (log.written, log.failed) == (0, 1)
