"""Where a worker listens for others: a port, or a path on this host."""

import os
import socket
from pathlib import Path

from router.blockset_errors import PeerError


def tcp_listener(host: str, port: int) -> socket.socket:
    """On a port; 0: any. Raises PeerError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise PeerError(f"tcp://{host}:{port}", str(error)) from error


def local_listener(path: Path) -> socket.socket:
    """On a path, for the same user alone; one that nobody listens on any more is taken over.

    Raises PeerError.
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
    """As others write it."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix://{name}"
    host = f"[{name[0]}]" if listener.family == socket.AF_INET6 else name[0]
    return f"tcp://{host}:{name[1]}"
