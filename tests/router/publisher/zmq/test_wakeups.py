"""A task that sleeps until one of its sockets has something."""

import asyncio
import time
from contextlib import contextmanager

import uvloop
import zmq

from router.publisher.zmq.wakeups import Wakeups


@contextmanager
def pair():
    with (
        zmq.Context() as context,
        context.socket(zmq.PAIR) as near,
        context.socket(zmq.PAIR) as far,
    ):
        near.bind("inproc://pair")
        far.connect("inproc://pair")
        yield near, far


def drain(socket):
    messages = []
    while True:
        try:
            messages.append(socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return messages


async def test_woken_by_a_message():
    with pair() as (near, far):
        wakeups = Wakeups()
        wakeups.add(near)
        await wakeups.wait(0.02)
        waiting = asyncio.create_task(wakeups.wait(300.0))
        await asyncio.wait([waiting], timeout=0.05)
        assert not waiting.done()
        far.send(b"1")
        await asyncio.wait_for(waiting, 60.0)
        assert wakeups.is_ready(near)
        assert drain(near) == [b"1"]
        wakeups.drained(near)
        assert not wakeups.is_ready(near)
        wakeups.remove(near)


async def test_messages_between_waits_are_not_missed():
    with pair() as (near, far):
        wakeups = Wakeups()
        wakeups.add(near)
        await wakeups.wait(0.02)
        far.send(b"1")
        far.send(b"2")
        await asyncio.sleep(0.05)
        await asyncio.wait_for(wakeups.wait(300.0), 60.0)
        assert drain(near) == [b"1", b"2"]
        wakeups.remove(near)


async def test_wait_ends_at_its_timeout():
    wakeups = Wakeups()
    await wakeups.wait(0.0)
    start_s = time.monotonic()
    await asyncio.wait_for(wakeups.wait(0.1), 60.0)
    assert time.monotonic() - start_s >= 0.09


async def test_an_unread_socket_does_not_keep_the_loop_busy():
    """Its descriptor stays quiet once it was looked at, though the message waits."""
    with pair() as (near, far):
        wakeups = Wakeups()
        wakeups.add(near)
        far.send(b"1")
        start_s = time.process_time()
        await asyncio.sleep(0.5)
        assert time.process_time() - start_s < 0.2
        wakeups.remove(near)


def test_a_wait_is_not_shorter_than_asked_for_on_either_loop():
    """A wait that is woken too early waits for the rest again. Where the process does not
    run between a turn's beginning and the wait, as on a busy machine, the timer is early after all.
    """

    async def longer_s(timeout_s):
        wakeups = Wakeups()
        await wakeups.wait(timeout_s)  # awake at first
        begun_s = time.monotonic()
        await wakeups.wait(timeout_s)
        return time.monotonic() - begun_s - timeout_s

    for new_loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            longer = [runner.run(longer_s(number / 7e3)) for number in range(1, 30)]
            assert sum(each >= 0.0 for each in longer) > 20
