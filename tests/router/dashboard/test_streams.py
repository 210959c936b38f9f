"""Viewers get frames; a slow one misses some, and then gets everything."""

import asyncio

import msgspec
import pytest

from router.dashboard import streams as streams_module
from router.dashboard.board.board import Board
from router.dashboard.streams import Streams, TooManyStreamsError
from router.observability.event_timeline import EventTimeline
from router.observability.health import ServiceStatus
from support.values.builders import World


@pytest.fixture
async def running(monkeypatch):
    """Streams that are looked for, and whether decisions are taken."""
    monkeypatch.setattr(streams_module, "INTERVAL_S", 0.01)
    world = World()
    world.worker(1)
    status = ServiceStatus("", needs_workers=False)
    board = Board("r", world.core, status, lambda: (0, 0, 0), EventTimeline(lambda: 0.0))
    attended = []

    def attend(*, is_watched):
        attended.append(is_watched)

    streams = Streams(board, 2, attend)
    task = asyncio.create_task(streams.run())
    yield streams, attended
    task.cancel()
    await asyncio.wait([task])


def reported(data):
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    return msgspec.json.decode(data[6:])


async def test_the_first_frame_is_whole_and_the_others_are_news(running):
    streams, _ = running
    stream = streams.join()
    first, second = reported(await stream.take()), reported(await stream.take())
    assert first["is_whole"]
    assert "is_whole" not in second
    assert second["number"] > first["number"]


async def test_no_frames_are_made_without_viewers(running, eventually):
    streams, attended = running
    assert (streams.frames, attended) == (0, [])
    stream = streams.join()
    await stream.take()
    assert attended == [True]
    streams.leave(stream)
    await eventually(lambda: attended == [True, False])
    again = streams.join()
    assert reported(await again.take())["is_whole"]
    assert attended == [True, False, True]
    assert streams.spent_s > 0


async def test_slow_viewer_misses_frames_and_then_gets_a_whole_one(running, eventually):
    streams, _ = running
    slow, quick = streams.join(), streams.join()
    await slow.take()
    await eventually(lambda: slow.has_frame)
    missed = streams.missed
    await eventually(lambda: streams.missed > missed)
    await slow.take()
    assert reported(await slow.take())["is_whole"]
    await quick.take()


async def test_stream_that_is_no_longer_admitted_ends(running, eventually):
    streams, _ = running
    tokens = {"a", "b"}
    ending, staying = (streams.join(lambda name=name: name in tokens) for name in "ab")
    await ending.take()
    tokens.remove("a")
    async with asyncio.timeout(60):
        while await ending.take():
            pass
    for _ in range(2):
        assert await staying.take()


async def test_streams_beyond_the_limit_are_refused(running):
    streams, _ = running
    first = streams.join()
    streams.join()
    with pytest.raises(TooManyStreamsError) as caught:
        streams.join()
    assert (caught.value.http_status, caught.value.most) == (503, 2)
    streams.leave(first)
    streams.join()


async def test_streams_end_with_the_router(running):
    streams, _ = running
    stream = streams.join()
    streams.close()
    while await stream.take():
        pass
    with pytest.raises(TooManyStreamsError):
        streams.join()


async def test_a_viewer_that_comes_late_gets_samples_from_before(running, eventually, monkeypatch):
    monkeypatch.setattr(streams_module, "UNWATCHED_S", 0.01)
    streams, _ = running
    stream = streams.join()
    await stream.take()
    streams.leave(stream)
    spent_s = streams.spent_s
    await eventually(lambda: streams.spent_s > spent_s)
    frames, spent_s = streams.frames, streams.spent_s
    await eventually(lambda: streams.spent_s > spent_s)
    assert streams.frames == frames
    assert len(reported(await streams.join().take())["history"]) >= 3
