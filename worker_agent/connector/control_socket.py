"""The socket on which the agent beside the engine sends commands to one worker's tiers.

agent ──a line: EngineCommand──▶ a thread for each connection ──▶ TierControl, or `answer_peers`
      ◀─a line: EngineReply─────
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from router.errors import InvalidFieldError, KvRouterError
from router.protocol.values import UNREADABLE
from worker_agent.manager.control import TierControl
from worker_agent.operations.messages import (
    BODY_LIMIT_BYTES,
    BlocksetsQuery,
    EngineCommand,
    EngineRefusal,
    EngineReply,
    KeepPeers,
    NamePeers,
    PeerCommand,
)
from worker_agent.sharing.accepting import (
    Guests,
    accept_until,
    address_of,
    hang_up,
    local_listener,
    tcp_listener,
)

IDLE_S = 60.0
"""Time limit for the next command on a connection, and for sending a reply."""
MAX_CONNECTIONS = 8
"""Connections beyond this disconnect the oldest."""
CLOSE_S = 5.0


class ControlSocket:
    """The commands to one worker's tiers, executed from construction to `close`."""

    __slots__ = (
        "_answer_peers", "_closed", "_control", "_decode", "_guests", "_listener", "_thread"
    )  # fmt: skip

    def __init__(
        self,
        address: str,
        control: TierControl,
        answer_peers: Callable[[PeerCommand], Struct],
    ) -> None:
        """Listen on `tcp://host:port` or `unix:///path`. Raises PeerError.

        `answer_peers`: executes a command about other engines, on any thread.
        """
        self._control = control
        self._answer_peers = answer_peers
        self._decode = msgspec.json.Decoder(EngineCommand).decode
        self._closed = Event()
        self._guests = Guests(0, MAX_CONNECTIONS)
        at = urlsplit(address)
        self._listener = (
            local_listener(Path(at.path))
            if at.scheme == "unix"
            else tcp_listener(at.hostname or "", at.port or 0)
        )
        self._thread = Thread(target=self._accept, name="tier-control", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where it listens."""
        return address_of(self._listener)

    def close(self) -> None:
        """Close all connections and wait for the threads; calling it again has no effect."""
        self._closed.set()
        hang_up(self._listener)
        self._listener.close()
        for thread in [self._thread, *self._guests.close()]:
            thread.join(CLOSE_S)

    def _accept(self) -> None:
        accept_until(self._closed, self._listener, self._welcome, lambda: None)

    def _welcome(self, connected: socket.socket) -> None:
        thread = Thread(target=self._serve, args=(connected,), name="tier-commands", daemon=True)
        self._guests.enter(thread, connected)
        thread.start()

    def _serve(self, connected: socket.socket) -> None:
        connected.settimeout(IDLE_S)
        try:
            with connected, connected.makefile("rb") as lines, suppress(OSError):
                while line := lines.readline(BODY_LIMIT_BYTES + 1):
                    connected.sendall(msgspec.json.encode(self._reply(line)) + b"\n")
                    if len(line) > BODY_LIMIT_BYTES:
                        return
        finally:
            self._guests.leave()

    def _reply(self, line: bytes) -> EngineReply:
        try:
            return EngineReply(msgspec.Raw(self._executed(line)))
        except KvRouterError as error:
            return EngineReply(refusal=EngineRefusal(str(error), error.code, error.http_status))

    def _executed(self, line: bytes) -> bytes:
        """Return the encoded reply. Raises KvRouterError."""
        if len(line) > BODY_LIMIT_BYTES:
            raise InvalidFieldError("command", "too long", f"at most {BODY_LIMIT_BYTES} bytes")
        try:
            command = self._decode(line)
        except UNREADABLE as error:
            raise InvalidFieldError("command", str(error), "an EngineCommand") from error
        if isinstance(command, NamePeers | KeepPeers | BlocksetsQuery):
            return msgspec.json.encode(self._answer_peers(command))
        return msgspec.json.encode(asyncio.run(self._control.answer(command)))
