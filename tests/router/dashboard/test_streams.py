"""Who watches gets frames; who is slow misses some, and then gets everything."""

import asyncio

import msgspec
import pytest

from builders import World
from router.dashboard import streams as streams_module
from router.dashboard.board import Board
from router.dashboard.errors import TooManyStreamsError
from router.dashboard.streams import Streams
from router.status import ServiceStatus
from router.timeline import Timeline


@pytest.fixture
async def running(monkeypatch):
    """Streams that are looked for, and whether decisions are taken."""
    monkeypatch.setattr(streams_module, "INTERVAL_S", 0.01)
    world = World()
    world.worker(1)
    status = ServiceStatus("", needs_workers=False)
    board = Board("r", world.core, status, lambda: (0, 0, 0), Timeline(lambda: 0.0))
    attended = []

    def attend(*, is_watched):
        attended.append(is_watched)

    streams = Streams(board, 2, attend)
    task = asyncio.create_task(streams.run())
    yield streams, attended
    task.cancel()
    await asyncio.wait([task])


def told(data):
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    return msgspec.json.decode(data[6:])


async def test_the_first_frame_is_whole_and_the_others_are_news(running):
    streams, _ = running
    stream = streams.join()
    first, second = told(await stream.take()), told(await stream.take())
    assert first["is_whole"]
    assert "is_whole" not in second
    assert second["number"] > first["number"]


async def test_nothing_is_looked_at_while_nobody_watches(running, eventually):
    streams, attended = running
    assert (streams.frames, attended) == (0, [])
    stream = streams.join()
    await stream.take()
    assert attended == [True]
    streams.leave(stream)
    await eventually(lambda: attended == [True, False])
    again = streams.join()
    assert told(await again.take())["is_whole"]
    assert attended == [True, False, True]
    assert streams.spent_s > 0


async def test_who_is_slow_misses_frames_and_then_gets_everything(running, eventually):
    streams, _ = running
    slow, quick = streams.join(), streams.join()
    await slow.take()
    await eventually(lambda: slow.has_frame)
    missed = streams.missed
    await eventually(lambda: streams.missed > missed)
    await slow.take()
    assert told(await slow.take())["is_whole"]
    await quick.take()


async def test_so_many_may_watch(running):
    streams, _ = running
    first = streams.join()
    streams.join()
    with pytest.raises(TooManyStreamsError) as caught:
        streams.join()
    assert (caught.value.http_status, caught.value.most) == (503, 2)
    streams.leave(first)
    streams.join()


async def test_streams_end_when_the_router_does(running):
    streams, _ = running
    stream = streams.join()
    streams.close()
    while await stream.take():
        pass
    with pytest.raises(TooManyStreamsError):
        streams.join()
