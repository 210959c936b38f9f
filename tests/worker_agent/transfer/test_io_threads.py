"""Calls with a deadline: one that never returns blocks no caller."""

import os
import threading
from concurrent.futures import FIRST_COMPLETED, wait

import pytest

from worker_agent.storage.errors import StorageError
from worker_agent.transfer.io_threads import IoThreads


@pytest.fixture
def io():
    of = IoThreads("disk", timeout_s=60)
    yield of
    of.close()


def test_calls_are_made_in_order_on_one_thread(io):
    made = []
    begun = [io.begin(lambda n=n: made.append(n) or threading.get_ident()) for n in range(5)]
    threads = {io.wait(each) for each in begun}
    assert made == list(range(5))
    assert threads.isdisjoint({threading.get_ident()})
    assert len(threads) == 1


def test_error_of_a_call_is_raised(io):
    for error in (ZeroDivisionError(), TimeoutError("its own")):

        def fail(error=error):
            raise error

        with pytest.raises(type(error)):
            io.wait(io.begin(fail))
    assert not io.is_late


def is_back(io):
    """Whether a call is taken, and answered as soon as a thread runs."""
    return io.begin(lambda: 7).result(60) == 7


async def test_hanging_call_times_out_and_blocks_new_ones_until_it_returns(eventually):
    """A read from a pipe without a writer hangs as a lost disk does."""
    io, (reader, writer) = IoThreads("disk", timeout_s=0.05), os.pipe()
    hanging = io.begin(lambda: os.read(reader, 1))
    with pytest.raises(StorageError, match=r"disk: no result within 0.05 s"):
        io.wait(hanging)
    with pytest.raises(StorageError, match="an earlier call has not returned"):
        io.begin(list)
    assert io.is_late
    os.write(writer, b"x")
    await eventually(lambda: not io.is_late)
    assert is_back(io)
    io.close()
    os.close(reader)
    os.close(writer)


def test_late_call_blocks_new_ones():
    io, (reader, writer) = IoThreads("disk", timeout_s=0.05, count=2), os.pipe()
    hanging = [io.begin(lambda: os.read(reader, 1)) for _ in range(2)]
    for each in hanging:
        with pytest.raises(StorageError, match=r"disk: no result within 0.05 s"):
            io.wait(each)
    os.write(writer, b"x")
    wait(hanging, 60, FIRST_COMPLETED)
    assert io.is_late
    with pytest.raises(StorageError, match="an earlier call has not returned"):
        io.begin(list)
    os.write(writer, b"x")
    wait(hanging, 60)
    assert is_back(io)
    io.close()
    os.close(reader)
    os.close(writer)
