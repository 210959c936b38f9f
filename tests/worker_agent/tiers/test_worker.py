"""The thread of a tier: in which order calls are made, and what becomes of those that are not."""

import time
from threading import Event

import pytest

from worker_agent.storage.errors import StorageError
from worker_agent.tiers.worker import TierJob, TierWorker


class Store:
    """What a tier's thread touches; it only notes."""

    def __init__(self):
        self.made = []
        self.is_closed = False

    def take_changes(self):
        return []

    def close(self):
        self.is_closed = True


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def worker(store):
    worker = TierWorker("host", store, 3, lambda finished: finished.finish())
    yield worker
    assert worker.close(time.monotonic() + 60)


def stalled(worker):
    """Its thread is busy until the event is set."""
    begun, go_on = Event(), Event()

    def stall():
        begun.set()
        return go_on.wait(60)

    worker.call(stall)
    assert begun.wait(60)
    return go_on


def noting(store, name):
    return TierJob(lambda: store.made.append(name), lambda *_: None)


def test_loads_precede_other_jobs(store, worker):
    go_on = stalled(worker)
    for name, is_load in [("s1", 0), ("l1", 1), ("s2", 0), ("l2", 1)]:
        assert worker.submit(noting(store, name), is_load=bool(is_load))
    go_on.set()
    worker.call(lambda: None).result(60)
    assert store.made == ["l1", "l2", "s1", "s2"]


def test_waiting_jobs_are_bounded_per_kind(store, worker):
    go_on = stalled(worker)
    assert [worker.submit(noting(store, "s")) for _ in range(4)] == [True] * 3 + [False]
    assert [worker.submit(noting(store, "l"), is_load=True) for _ in range(4)] == [True] * 3 + [
        False
    ]
    with pytest.raises(StorageError, match="too busy"):
        worker.call(lambda: None).result(60)
    go_on.set()


def test_close_runs_waiting_jobs(store):
    worker = TierWorker("disk", store, 3, lambda finished: finished.finish())
    go_on = stalled(worker)
    worker.submit(noting(store, "s"))
    go_on.set()
    assert worker.close(time.monotonic() + 60)
    assert (store.made, store.is_closed) == (["s"], True)
    assert not worker.submit(noting(store, "late"))
