"""Routers among simulated faults, recorded: a replayed core ends in the same state."""

from random import Random

import pytest

from router.core.core import RouterCore
from router.recording.format import Line, decode_lines, encode_line
from router.recording.recorded_core import RecordedCore
from router.recording.replay import Replay
from simulation import routers, run
from support.fleets.recordings import state

RUNS = 40


@pytest.fixture
def recorded(monkeypatch):
    """Of every router: its core, its entries, and how to make a core like it."""
    made = []

    def make(settings, make_indexer, rng):
        begin, entries = rng.getstate(), []
        core = RecordedCore(RouterCore(settings, make_indexer, rng), entries.append).core
        made.append((core, entries, (settings, make_indexer, begin)))
        return core

    monkeypatch.setattr(routers, "RouterCore", make)
    return made


def test_every_router_of_every_run_replays_equal(recorded):
    results = list(run.run_seeds(range(RUNS)))
    assert not any(result.failures for result in results)
    assert len(recorded) >= RUNS
    assert {type(each.command).__name__ for _, entries, _ in recorded for each in entries} > {
        "Apply", "ApplyLoad", "BeginFill", "MarkBeacon", "Search", "Settle", "Tick", "UpsertWorker",
    }  # fmt: skip
    for core, entries, parts in recorded:
        assert state(core) == state(_replayed(entries, *parts))


def _replayed(entries, settings, make_indexer, begin):
    rng = Random()
    rng.setstate(begin)
    core = RouterCore(settings, make_indexer, rng)
    replay = Replay(core)
    for number, line in decode_lines(encode_line(Line(0.0, each)) for each in entries):
        replay.take(number, line)
    return core
