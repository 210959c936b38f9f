"""Which peer has blocks: the answers are of the one with the longest beginning, and bounded."""

import socket
from contextlib import contextmanager

import pytest

from router.protocol.values import Rank
from support.fleets import peering
from support.fleets.peering import HOST, Worker, identities
from support.processes.servers import free_port, until
from worker_agent.sharing import peer_server
from worker_agent.sharing.pause import LEFT_ALONE_S
from worker_agent.sharing.peer_client import PeerClient
from worker_agent.sharing.peer_finder import FIND_S, PeerFinder


class Finding:
    """A finder; time is what the test says, but for that of sockets."""

    def __init__(self, *addresses, timeout_s=60.0, token=peering.TOKEN):
        self.now_s, self._numbers = 100.0, 0
        self._options = token, timeout_s
        self.finder = PeerFinder(addresses, self._connect, lambda: self.now_s)

    def _connect(self, address):
        token, timeout_s = self._options
        return PeerClient(address, None, token, timeout_s=timeout_s)

    def ask(self, *numbers, source=None):
        self._numbers += 1
        self.finder.ask(self._numbers, identities(*numbers), source)
        return self._numbers

    def find(self, *numbers, source=None):
        """The places found of these blocks."""
        number, answers = self.ask(*numbers, source=source), []
        until(lambda: answers.extend(self.finder.take_answers()) or answers)
        assert [each for each, _ in answers] == [number]
        return answers[0][1]


@contextmanager
def finding(*addresses, **options):
    each = Finding(*addresses, **options)
    try:
        yield each
    finally:
        each.finder.close()


def at(worker):
    return worker.server.addresses[0]


@pytest.fixture
def workers():
    with Worker(1, dp_rank=3) as first, Worker(2) as second:
        yield first, second


def test_blocks_are_found_at_the_peer_with_the_longest_beginning(workers):
    first, second = workers
    first.keep(HOST, [1, 4, 5, 6])
    second.keep(HOST, [1, 2])
    with finding(at(first), at(second)) as here:
        assert here.finder.source_of(identities(1)) is None
        assert here.find(1, 2, 3, 4, 5, 6) == [0, 1]
        source = here.finder.source_of(identities(0, 1, 2, 3))
        assert (source.rank, source.addresses, source.blocks) == (Rank(2, 0), [at(second)], 3)
        assert here.find(4, 5, 7) == [0, 1]
        assert here.finder.source_of(identities(4)).rank == Rank(1, 3)
        assert here.find(7, 8) == []
        assert here.finder.unanswered == 0


def test_only_the_named_source_is_asked_once_it_is_known(workers):
    first, second = workers
    first.keep(HOST, [1])
    second.keep(HOST, [1, 2])
    with finding(at(first), at(second)) as here:
        assert here.find(1, 2, source=Rank(1, 3)) == [0, 1], "nothing is known of any yet"
        assert here.find(1, 2, source=Rank(1, 3)) == [0]
        assert here.find(1, 2, source=Rank(9, 0)) == [0, 1]


def test_a_peer_that_is_gone_is_left_alone_for_a_while(workers):
    first, _ = workers
    port = free_port()
    first.keep(HOST, [1])
    with finding(at(first), f"tcp://127.0.0.1:{port}") as here:
        assert here.find(1) == [0]
        with Worker(3, port=port) as third:
            third.keep(HOST, [1, 2])
            assert here.find(1, 2) == [0]
            assert here.finder.unanswered == 2
            here.now_s += LEFT_ALONE_S
            assert here.find(1, 2) == [0, 1]


def test_a_peer_that_is_late_delays_one_question_and_is_not_asked_the_next(workers):
    first, _ = workers
    first.keep(HOST, [1])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        slow = "tcp://{}:{}".format(*silent.getsockname())
        with finding(slow, at(first), timeout_s=1.0) as here:
            waiting, answers = here.ask(1), {}
            here.now_s += FIND_S + 0.1

            def is_found_at_the_other():
                asked = here.ask(1)
                until(lambda: answers.update(here.finder.take_answers()) or asked in answers)
                return answers[asked] == [0]

            until(is_found_at_the_other)
            assert waiting not in answers
            until(lambda: answers.update(here.finder.take_answers()) or waiting in answers)
            assert answers[waiting] == [0]


def test_a_peer_with_another_token_or_that_refuses_has_nothing(workers, monkeypatch):
    first, _ = workers
    first.keep(HOST, [1, 2])
    with finding(at(first), token=b"another") as here:
        assert here.find(1) == []
    monkeypatch.setattr(peer_server, "MAX_NAMED_BLOCKS", 1)
    with finding(at(first)) as here:
        assert here.find(1, 2) == []
        assert here.finder.unanswered == 1


def test_without_peers_nothing_is_found():
    with finding() as here:
        assert here.find(1) == []
