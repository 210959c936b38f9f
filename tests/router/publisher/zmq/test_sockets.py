"""A context for many engines: sockets beyond ZMQ's own default, open files as allowed."""

import logging
import resource

import pytest
import zmq

from router.publisher.zmq.sockets import open_context


@pytest.fixture
def file_limit():
    """Restores the limit on open files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_more_sockets_than_zmq_has_by_default(file_limit):
    resource.setrlimit(resource.RLIMIT_NOFILE, (1_024, file_limit[1]))
    with open_context(400) as context:
        sockets = [context.socket(zmq.SUB) for _ in range(1_600)]
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 4_000
        for socket in sockets:
            socket.close()


def test_sockets_beyond_the_limit_are_warned_of(file_limit, caplog):
    with caplog.at_level(logging.WARNING), open_context(1_000_000):
        assert "enough for" in caplog.text
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == file_limit[1]


def test_a_limit_that_is_enough_is_left_alone(file_limit):
    resource.setrlimit(resource.RLIMIT_NOFILE, (2_000, file_limit[1]))
    with open_context(10):
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 2_000
