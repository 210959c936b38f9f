"""Accepting of connections, until a server knows who is there: listeners, strangers, TLS.

listener ─▶ accept_until, which nothing ends but its owner ─▶ Guests: strangers ─▶ proven peers
"""

import logging
import os
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread, current_thread

from worker_agent.sharing.errors import PeerError

log = logging.getLogger(__name__)

FAILED_S = 0.05
"""Pause after a failure, such as a lack of file descriptors or threads, which others may return."""


def tcp_listener(host: str, port: int) -> socket.socket:
    """Return a listener on a port; 0: any free port. Raises PeerError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise PeerError(f"tcp://{host}:{port}", str(error)) from error


def local_listener(path: Path) -> socket.socket:
    """Return a listener on a path, accessible to the same user only. Raises PeerError.

    A file at that path is replaced.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen()
    except OSError as error:
        listener.close()
        raise PeerError(f"unix://{path}", str(error)) from error
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the listener's address in the form that peers use."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix://{name}"
    host = f"[{name[0]}]" if listener.family == socket.AF_INET6 else name[0]
    return f"tcp://{host}:{name[1]}"


def accept_until(
    closed: Event,
    listener: socket.socket,
    welcome: Callable[[socket.socket], None],
    failed: Callable[[], None],
) -> None:
    """Accept connections until `closed` is set. `failed`: counts failures of either call.

    `welcome` takes the connection over unless it raises OSError or RuntimeError (no new thread).
    """
    was_failing = False
    while not closed.is_set():
        connected = None
        try:
            connected, _ = listener.accept()
            welcome(connected)
        except (OSError, RuntimeError) as error:
            if closed.is_set():
                return
            if connected is not None:
                connected.close()
            failed()
            if not was_failing:
                log.warning("a connection could not be accepted: %s; trying on", error)
            was_failing = True
            time.sleep(FAILED_S)
        else:
            was_failing = False


class Guests:
    """The connections of a server, each with its thread: those of strangers, and proven ones.

    A stranger may take the place of the stranger that came first, but never that of a proven peer,
    so that peers enter however many strangers hold sockets.
    """

    __slots__ = ("_is_closed", "_lock", "_most_proven", "_most_strangers", "_proven", "_strangers")

    def __init__(self, most_proven: int, most_strangers: int) -> None:
        self._most_proven = most_proven
        self._most_strangers = most_strangers
        self._lock = Lock()
        self._strangers: OrderedDict[Thread, socket.socket] = OrderedDict()
        self._proven: dict[Thread, socket.socket] = {}
        self._is_closed = False

    @property
    def proven_count(self) -> int:
        """Number of proven connections."""
        return len(self._proven)

    @property
    def stranger_count(self) -> int:
        """Number of connections that are not proven yet."""
        return len(self._strangers)

    def enter(self, thread: Thread, connection: socket.socket) -> bool:
        """Add a stranger. Returns False if another one was disconnected for it, or after `close`.

        After `close` the connection itself is disconnected.
        """
        with self._lock:
            self._strangers[thread] = connection
            if self._is_closed:
                hang_up(connection)
                return False
            if len(self._strangers) <= self._most_strangers:
                return True
            hang_up(self._strangers.popitem(last=False)[1])
            return False

    def secured(self, connection: socket.socket) -> None:
        """Replace this thread's connection by the one that encrypts it."""
        with self._lock:
            if current_thread() in self._strangers and not self._is_closed:
                self._strangers[current_thread()] = connection
                return
        hang_up(connection)

    def prove(self) -> bool:
        """Note that this thread's peer is proven. Returns False if there are too many, or gone."""
        with self._lock:
            connection = self._strangers.pop(current_thread(), None)
            if connection is None or len(self._proven) >= self._most_proven or self._is_closed:
                return False
            self._proven[current_thread()] = connection
            return True

    def leave(self) -> None:
        """Remove this thread's connection."""
        with self._lock:
            self._strangers.pop(current_thread(), None)
            self._proven.pop(current_thread(), None)

    def close(self) -> list[Thread]:
        """Disconnect all, also those that enter later. Returns the threads that are ending."""
        with self._lock:
            self._is_closed = True
            everyone = {**self._strangers, **self._proven}
        for connection in everyone.values():
            hang_up(connection)
        return list(everyone)


def secured(
    connection: socket.socket,
    address: str,
    tls: ssl.SSLContext | None,
    guests: Guests,
    timeout_s: float,
) -> socket.socket:
    """Return this thread's connection, encrypted if it is a port's and there is TLS.

    `address`: of the listener. `timeout_s`: of the handshake. Raises PeerError.
    """
    if connection.family == socket.AF_UNIX:
        return connection
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is None:
            return connection
        connection.settimeout(timeout_s)
        wrapped = tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
    except OSError as error:
        raise PeerError(address, str(error)) from error
    guests.secured(wrapped)
    try:
        wrapped.do_handshake()
    except OSError as error:
        wrapped.close()
        raise PeerError(address, str(error)) from error
    return wrapped


def hang_up(connection: socket.socket) -> None:
    """Disconnect a socket, whose thread closes it."""
    with suppress(OSError):  # It may already be disconnected.
        connection.shutdown(socket.SHUT_RDWR)
