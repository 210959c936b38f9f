"""What is wrong with an engine, in words, while the one beside it is followed undisturbed."""

import asyncio
import http.server
import logging
import threading
import time
from contextlib import ExitStack, asynccontextmanager, contextmanager
from itertools import count

import pytest
import zmq

from router.protocol.values import Rank
from router.publisher.batch_order.address import EngineAddress
from router.publisher.feed.pacing import Pacing
from router.publisher.follower.follower import EngineFollower, FollowerSettings
from router.publisher.follower.loop_slices import SliceScheduler
from router.publisher.journal.journal import EventJournal
from router.publisher.normalizer.normalizer import Normalizer
from support.engines.engines import names
from support.engines.zmq_engines import Engine, stored
from support.processes.servers import free_port
from support.values.builders import IDENTITY


class Followed:
    """Engines followed in one process, by name."""

    def __init__(self, context):
        self._context = context
        self._pacing, self._turns = Pacing(), SliceScheduler()
        self.followers, self.journals, self.tasks = {}, {}, []

    def add(self, name, events, replay=None, topic=""):
        rank = Rank(len(self.followers), 0)
        journal = self.journals[name] = EventJournal(rank, 1, IDENTITY)
        follower = self.followers[name] = EngineFollower(
            rank,
            journal,
            Normalizer(journal, IDENTITY),
            FollowerSettings(EngineAddress(events, replay, topic)),
            lambda _: journal.take(),
            self._pacing,
            self._turns,
        )
        self.tasks.append(asyncio.create_task(follower.run(self._context)))

    def status(self, name):
        return self.followers[name].status(time.monotonic())

    def says(self, name, words):
        return words in (self.status(name).problem or "")

    def held(self, name):
        return set(self.journals[name].held(0).tolist())


@asynccontextmanager
async def followed():
    with zmq.Context() as context:
        one = Followed(context)
        try:
            yield one
        finally:
            for task in one.tasks:
                task.cancel()
            await asyncio.wait(one.tasks)


@contextmanager
def http_server():
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), http.server.BaseHTTPRequestHandler
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"tcp://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextmanager
def silent_router():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.set(zmq.LINGER, 0)
        yield f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"


def nobody():
    return f"tcp://127.0.0.1:{free_port()}"


def block(number, **fields):
    return stored([number], [number] * 4, **fields)


def blocks(*numbers):
    return {names([number] * 4)[0] for number in numbers}


async def test_each_mistake_has_its_message_and_affects_no_other_follower(eventually, caplog):
    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        engine = stack.enter_context(Engine(topic="kv"))
        other = stack.enter_context(Engine())
        second = stack.enter_context(Engine(dp_rank=1))
        events, replay = engine.endpoint, engine.replay_endpoint
        rank_1 = f"tcp://127.0.0.1:{second.port + 1}"
        rank_1_replay = f"tcp://127.0.0.1:{second.replay_port + 1}"
        mistakes = {
            "nothing listens there": (nobody(), replay),
            "is it the HTTP port": (stack.enter_context(http_server()), replay),
            f"events at {replay}: what listens there is no such socket": (replay, events),
            "cannot be resolved": ("tcp://no-such-host.invalid:5557", replay),
            f"no replay from {events}: what listens there is no such socket": (events, events),
            "is it the engine's replay endpoint": (events, stack.enter_context(silent_router())),
            f"no replay from {engine.endpoint[:16]}": (events, nobody()),
            "are both endpoints of one engine": (events, other.replay_endpoint),
            "register this endpoint as rank 1": (rank_1, rank_1_replay),
            "none live: we subscribe to topic 'vk'": (events, replay, "vk"),
            "publishes another topic than 'vk'": (events, None, "vk"),
        }
        async with followed() as one:
            one.add("good", events, replay, "kv")
            for words, address in mistakes.items():
                one.add(words, *address)
            missing, numbers = set(mistakes), count()

            def all_reported():
                number = next(numbers)
                for each in (engine, other, second):
                    each.publish(block(number))
                missing.difference_update([each for each in missing if one.says(each, each)])
                return not missing

            await eventually(all_reported)
            engine.wait()
            expected = blocks(*range(len(engine.published)))
            await eventually(lambda: one.held("good") == expected)
            assert (one.status("good").condition, one.status("good").problem) == ("following", None)
            assert one.followers["good"].source.connections == 1
    assert "rank 1.0: cannot connect to its events" in caplog.text


async def test_an_engine_that_comes_late_has_no_problem_any_more(eventually):
    engine = Engine()
    async with followed() as one:
        one.add("late", engine.endpoint, engine.replay_endpoint)
        await eventually(lambda: one.says("late", "nothing listens there"))
        with engine:
            await eventually(lambda: one.status("late").condition == "following")
            assert one.status("late").problem is None


async def test_messages_that_are_no_batches(eventually):
    with Engine() as engine:
        async with followed() as one:
            one.add("garbled", engine.endpoint, engine.replay_endpoint)
            engine.publish(block(1))
            await eventually(lambda: one.held("garbled") == blocks(1))
            engine.send_raw([b"", b"four", b"frames", b"!"])
            await eventually(lambda: one.followers["garbled"].source.garbage == 1)
            engine.publish_payload(b"HTTP/1.1 200 OK")
            engine.publish(block(2))
            await eventually(lambda: one.says("garbled", "not a batch of events"))
            await eventually(lambda: one.held("garbled") == blocks(1, 2))


@pytest.mark.parametrize(("size", "hashes"), [(8, [1]), (2, [1, 2])])
async def test_another_model_at_the_same_address(eventually, size, hashes):
    with Engine() as engine:
        async with followed() as one:
            one.add("model", engine.endpoint, engine.replay_endpoint)
            engine.publish(block(1))
            await eventually(lambda: one.held("model") == blocks(1))
            engine.restart([stored(hashes, [7] * size * len(hashes), block_size=size)])
            await eventually(lambda: one.says("model", f"with block_size {size}"))
            assert one.held("model") == set()
            engine.restart([block(3)])
            await eventually(lambda: one.held("model") == blocks(3))
            assert one.status("model").problem is None


async def test_lasting_problem_is_logged_once(eventually, caplog):
    with caplog.at_level(logging.WARNING):
        async with followed() as one:
            one.add("absent", nobody())
            await eventually(lambda: one.followers["absent"].source.failed_connections >= 4)
    assert caplog.text.count("nothing listens there") == 1
