"""Two hops: in which order, overlapped, and what becomes of the rest when one fails."""

import threading

import pytest

from worker_agent.storage.errors import StorageError
from worker_agent.transfer.io_threads import IoThreads
from worker_agent.transfer.pipeline import batches_of, inward, outward
from worker_agent.transfer.plan import BlockResult, leading

DONE, FAILED = BlockResult.DONE, BlockResult.FAILED


@pytest.fixture(params=[0, 1, 2])
def io(request):
    of = IoThreads("disk", timeout_s=60, count=request.param) if request.param else None
    yield of
    if of is not None:
        of.close()


class Ways:
    """Notes which batch is on which hop, in which buffer; fails at a batch."""

    def __init__(self, fails_at=None):
        self.hops, self._fails_at = [], fails_at

    def far(self, batch, turn):
        self.hops.append(("far", batch.start, turn))
        if batch.start == self._fails_at:
            raise StorageError("disk", "gone", "a disk")
        return [DONE] * len(batch)

    def near(self, batch, turn, arrived=None):
        self.hops.append(("near", batch.start, turn))
        return arrived

    def on(self, hop):
        return [(start, turn) for which, start, turn in self.hops if which == hop]


def turns(io):
    """A buffer for each batch under way, and for one that waits or is looked at."""
    buffers = 2 if io is None else io.count + 1
    return [(start, number % buffers) for number, start in enumerate((0, 2, 4, 6))]


@pytest.mark.parametrize("way", [outward, inward])
def test_each_batch_goes_over_both_hops_in_order(io, way):
    ways = Ways()
    hops = (ways.near, ways.far) if way is outward else (ways.far, ways.near)
    assert way(io, batches_of(7, 2), *hops) == [DONE] * 7
    assert ways.on("near") == sorted(ways.on("far")) == turns(io)
    assert way(io, [], *hops) == []


@pytest.mark.parametrize("way", [outward, inward])
def test_batches_after_a_failure_fail(io, way):
    ways = Ways(fails_at=2)
    hops = (ways.near, ways.far) if way is outward else (ways.far, ways.near)
    outcomes = way(io, batches_of(5, 2), *hops)
    assert outcomes == [DONE, DONE, FAILED, FAILED, FAILED]
    assert leading(outcomes) == 2


@pytest.mark.parametrize("way", [outward, inward])
def test_unexpected_error_is_raised_without_waiting(io, way):
    def broken(batch, turn):
        raise RuntimeError("odd")

    ways = Ways()
    hops = (ways.near, broken) if way is outward else (broken, ways.near)
    with pytest.raises(RuntimeError, match="odd"):
        way(io, batches_of(5, 2), *hops)


def test_both_hops_are_taken_at_once():
    """The next batch is read while this one is looked at: each waits for the other."""
    io, begun = IoThreads("disk", timeout_s=60), [threading.Event() for _ in range(3)]

    def far(batch, turn):
        begun[batch.start].set()
        return turn

    def near(batch, turn, arrived):
        assert arrived == turn
        if batch.start < 2:
            assert begun[batch.start + 1].wait(60)
        return [DONE]

    assert inward(io, batches_of(3, 1), far, near) == [DONE] * 3
    io.close()


def test_threads_are_on_the_far_hop_together():
    """Each read waits for the other."""
    io, meeting = IoThreads("disk", timeout_s=60, count=2), threading.Barrier(2, timeout=60)

    def far(batch, turn):
        meeting.wait()
        return [DONE] * len(batch)

    ways = Ways()
    assert inward(io, batches_of(4, 1), far, ways.near) == [DONE] * 4
    assert outward(io, batches_of(4, 1), ways.near, far) == [DONE] * 4
    io.close()


@pytest.mark.parametrize("count", [1, 2])
def test_no_batch_is_begun_behind_a_late_one(count):
    io = IoThreads("disk", timeout_s=0.05, count=count)
    far_ones, free = [], threading.Event()

    def far(batch, _turn):
        far_ones.append(batch.start)
        free.wait(60)
        return [DONE] * len(batch)

    def near(batch, _turn, arrived):
        return arrived

    assert inward(io, batches_of(6, 2), far, near) == [FAILED] * 6
    free.set()
    io.close()
    assert sorted(far_ones) == [0, 2][:count]


def test_nothing_is_on_its_way_when_the_near_hop_raises(io):
    ways = Ways()

    def near(batch, _turn, _arrived):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        inward(io, batches_of(5, 2), ways.far, near)
    assert io is None or io.wait(io.begin(lambda: len(ways.on("far")))) <= io.count + 1
