"""When an event loop is overloaded, and which requests it refuses then."""

import asyncio
import json
import socket
import time

import pytest

from router.runtime.http_server.overload import (
    ADMITTING_S,
    LATE_FOR_S,
    LATE_S,
    MOST_WAITING,
    WINDOW_S,
    Overload,
    OverloadedError,
)
from support.processes.running import RunningRouter


class Iterations:
    """An event loop, and its clock."""

    def __init__(self):
        self.now_s = 100.0
        self.overload = Overload(lambda: self.now_s)

    def run(self, responses, duration_s, checks=0):
        """Run an iteration; returns how much of its new work was refused."""
        self.overload.begin()
        refused = 0
        for _ in range(checks):
            self.now_s += duration_s / checks
            try:
                self.overload.check()
            except OverloadedError:
                refused += 1
        if not checks:
            self.now_s += duration_s
        self.overload.end(responses)
        return refused

    def become_overloaded(self):
        while not self.overload.is_on:
            self.run(MOST_WAITING + 1, LATE_FOR_S / 4)


@pytest.fixture
def loop():
    return Iterations()


@pytest.mark.parametrize(
    ("responses", "duration_s"), [(MOST_WAITING + 1, 0.03), (1, LATE_S + 0.01)]
)
def test_late_iterations_for_some_time_are_overload(loop, responses, duration_s):
    loop.run(responses, duration_s)
    until_s = loop.now_s + LATE_FOR_S
    while loop.now_s + duration_s < until_s:
        loop.run(responses, duration_s)
        assert not loop.overload.is_on
    loop.run(responses, duration_s)
    assert loop.overload.is_on


@pytest.mark.parametrize("duration_s", [LATE_S + 0.01, 10 * LATE_S])
def test_one_late_iteration_of_a_suspended_process_is_no_overload(loop, duration_s):
    loop.run(30, duration_s, checks=30)
    assert loop.run(30, 2 * ADMITTING_S, checks=30) == 0


def test_one_iteration_in_time_begins_the_count_again(loop):
    for _ in range(10):
        loop.run(MOST_WAITING + 1, 0.9 * LATE_FOR_S)
        loop.run(MOST_WAITING, 0.01)
    assert not loop.overload.is_on


def test_late_iterations_long_after_each_other_are_no_overload(loop):
    for _ in range(10):
        loop.run(MOST_WAITING + 1, 0.9 * LATE_FOR_S)
        loop.now_s += 1.1 * LATE_FOR_S
    assert not loop.overload.is_on


def test_new_work_is_admitted_at_the_beginning_of_an_iteration_and_then_refused(loop):
    loop.become_overloaded()
    loop.overload.check()  # between two iterations
    assert loop.run(100, 2 * ADMITTING_S, checks=100) == 50


def test_without_overload_nothing_is_refused(loop):
    assert loop.run(MOST_WAITING, LATE_S, checks=MOST_WAITING) == 0


def test_it_lasts_while_much_is_refused(loop):
    loop.become_overloaded()
    until_s = loop.now_s + 10 * WINDOW_S
    while loop.now_s < until_s:
        assert loop.run(100, 2 * ADMITTING_S, checks=100)


def test_it_ends_once_little_is_refused(loop):
    loop.become_overloaded()
    until_s = loop.now_s + WINDOW_S + 2 * ADMITTING_S
    while loop.now_s < until_s:
        loop.run(50, 1.2 * ADMITTING_S, checks=50)
    assert not loop.overload.is_on


def test_it_ends_when_the_loop_was_idle(loop):
    loop.become_overloaded()
    assert loop.run(100, 2 * ADMITTING_S, checks=100)
    loop.now_s += 1.1 * WINDOW_S
    assert loop.run(100, 2 * ADMITTING_S, checks=100) == 0
    assert not loop.overload.is_on


def request(method, path, body=b""):
    length = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if body else ""
    return f"{method} {path} HTTP/1.1\r\nhost: x\r\n{length}\r\n".encode() + body


async def read_answer(reader):
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    status, *lines = head.splitlines()[:-1]
    headers = dict(line.split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


@pytest.fixture
async def router():
    async with RunningRouter("", use_kv_events=False).running() as router:
        worker = {"worker_id": 1, "endpoint": "http://w", "block_size": 4}
        await router.post("/workers", {**worker, "max_num_batched_tokens": 16})
        yield router


SELECT, HEALTH = request("POST", "/select", b'{"token_ids": [1]}'), request("GET", "/health")
FREE = request("DELETE", "/reservations/r")


class LateIterations:
    """Iterations of the event loop that follow each other, each blocked between its requests.

    Each reads a selection, is blocked, and then reads a selection and two other requests.
    """

    def __init__(self, url, count):
        self._left = count
        self._blocks, self._blocked = socket.socketpair()
        self._sockets = [socket.create_connection((url.host, url.port)) for _ in range(4)]

    def _begin(self):
        self._left -= 1
        for requester, body in zip(self._sockets, (SELECT, SELECT, FREE, HEALTH), strict=True):
            requester.sendall(body)
            if requester is self._sockets[0]:
                self._blocks.send(b"x")

    def _block(self):
        self._blocked.recv(1)
        time.sleep(LATE_S + 0.1)
        if self._left:
            self._begin()

    async def answers(self):
        """Answers of each of the four connections."""
        loop, count = asyncio.get_running_loop(), self._left
        loop.add_reader(self._blocked, self._block)
        connections = [await asyncio.open_connection(sock=each) for each in self._sockets]
        for requester, (reader, _) in zip(self._sockets, connections, strict=True):
            requester.sendall(HEALTH)  # the router has accepted the connection
            await read_answer(reader)
        self._begin()
        async with asyncio.timeout(60):
            answers = [
                [await read_answer(reader) for _ in range(count)] for reader, _ in connections
            ]
        loop.remove_reader(self._blocked)
        self._blocks.close()
        self._blocked.close()
        for _, writer in connections:
            writer.close()
        return answers


async def test_an_overloaded_router_refuses_new_work_alone(router, eventually):
    refused = []
    for _ in range(10):
        first, second, freed, healths = await LateIterations(router.client.base_url, 3).answers()
        assert {status for status, _, _ in freed} == {404}
        assert {status for status, _, _ in healths} == {200}
        refused = [answer for answer in (*first, *second) if answer[0] != 200]
        if refused:
            break
    assert {(status, headers["retry-after"]) for status, headers, _ in refused} == {(503, "1")}
    assert json.loads(refused[0][2])["code"] == "overloaded"
    counted = await router.metric('kv_router_refusals_total{code="overloaded",interface="http"}')
    assert counted == len(refused)

    async def selects():
        return (await router.post("/select", {"token_ids": [1]})).status_code == 200

    await eventually(selects)
