"""The addresses at which an engine publishes and replays."""

import re

from msgspec import Struct

from router.errors import InvalidFieldError

_ALLOWED = "tcp://host:port with a host to connect to, or ipc:///path"
_TCP = re.compile(r"tcp://(?P<host>[^\s/*:]+|\[[0-9A-Fa-f:.%\w]+\]):(?P<port>\d{1,5})")
_IPC = re.compile(r"ipc://[^\s*]+")
_MAX_PORT = 65_535


class EngineAddress(Struct, frozen=True):
    """The sockets of one rank's publisher. `replay`: None if there is none; `topic`: a prefix."""

    events: str
    replay: str | None = None
    topic: str = ""


def engine_address(
    events: str, replay: str | None, topic: str = "", dp_rank: int = 0
) -> EngineAddress:
    """Return the address of a rank, from the settings of rank 0. Raises InvalidFieldError."""
    return EngineAddress(
        rank_endpoint(events, dp_rank, "endpoint"),
        None if replay is None else rank_endpoint(replay, dp_rank, "replay_endpoint"),
        topic,
    )


def rank_endpoint(endpoint: str, dp_rank: int, field: str = "endpoint") -> str:
    """Return the endpoint of a rank: engines add the rank to the port. Raises InvalidFieldError."""
    if tcp := _TCP.fullmatch(endpoint):
        port = int(tcp["port"]) + dp_rank
        if not 0 < port <= _MAX_PORT:
            allowed = f"a port of at most {_MAX_PORT - dp_rank}, for rank {dp_rank}"
            raise InvalidFieldError(field, f"port {tcp['port']}", allowed, status=422)
        return f"tcp://{tcp['host']}:{port}"
    if not _IPC.fullmatch(endpoint):
        raise InvalidFieldError(field, f"{endpoint!r} is no endpoint", _ALLOWED, status=422)
    if dp_rank:
        allowed = "tcp://host:port where there are several ranks"
        raise InvalidFieldError(field, "a path cannot be offset by a rank", allowed, status=422)
    return endpoint
