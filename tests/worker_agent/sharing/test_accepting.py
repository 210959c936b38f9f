import resource
import socket
from contextlib import contextmanager
from threading import Event, Thread

from support.processes.servers import until
from worker_agent.sharing.accepting import accept_until


@contextmanager
def accepting(welcome):
    """A listener whose thread accepts, and the failures that it counts."""
    closed, failures = Event(), []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        run = closed, listener, welcome, lambda: failures.append(None)
        thread = Thread(target=accept_until, args=run)
        thread.start()
        yield listener.getsockname(), failures
        closed.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)
        assert not thread.is_alive()


def test_failure_to_serve_a_connection_ends_it_alone():
    errors = [RuntimeError("can't start new thread"), OSError("no memory")]

    def welcome(connection):
        if errors:
            raise errors.pop(0)
        with connection:
            connection.sendall(b"hello")

    with accepting(welcome) as (address, failures):
        answers = []
        for _ in range(3):
            with socket.create_connection(address, 60) as connection:
                answers.append(connection.recv(9))
        assert answers == [b"", b"", b"hello"]
        assert len(failures) == 2


def test_lack_of_file_descriptors_ends_nothing():
    def welcome(connection):
        with connection:
            connection.sendall(b"hello")

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with accepting(welcome) as (address, failures), socket.socket() as one, socket.socket() as two:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        try:
            for connection in (one, two):  # the first has its descriptor since accepting began
                connection.connect(address)
            until(lambda: failures)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert failures
        for connection in (one, two):
            connection.settimeout(60)
        assert [one.recv(9), two.recv(9)] == [b"hello", b"hello"]
