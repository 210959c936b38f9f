"""As much of ZMTP as tells who listens on a port: greetings, and the type of the other's socket.

    both     greeting, 64 bytes: FF … 7F │ version │ mechanism, 20 bytes │ role and filler
    each     READY, its metadata {"Socket-Type": "PUB", …}          (mechanism NULL)

Source: ZMTP 3.0 and 3.1 (rfc.zeromq.org, 23 and 37). Who finds that mechanisms differ hangs up, so
the other's is read before ours is said. We say no READY, so that the other never has a peer.
"""

GREETING_BYTES = 64
VERSION_BYTES = 12
"""So much of a greeting comes before the mechanism."""

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_MECHANISM = slice(VERSION_BYTES, VERSION_BYTES + 20)
_READY = b"\x05READY"
_SOCKET_TYPE = b"socket-type"

GREETING = (_SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0")).ljust(GREETING_BYTES, b"\0")
"""What we say first."""


def is_zmtp(first_bytes: bytes) -> bool:
    """Are these the first bytes of a ZMTP peer, as far as they go?"""
    return (
        bool(first_bytes)
        and first_bytes[:1] == b"\xff"
        and (len(first_bytes) < len(_SIGNATURE) or first_bytes[9] & 1 == 1)
    )


def mechanism(greeting: bytes) -> str:
    """The security mechanism of a whole greeting: NULL, PLAIN, CURVE or something else."""
    return greeting[_MECHANISM].rstrip(b"\0").decode(errors="backslashreplace")


def socket_type(frames: bytes) -> str | None:
    """The type of the other's socket, from what follows its greeting; None if it is not there."""
    begin = frames.find(_READY)
    if begin < 0:
        return None
    at = begin + len(_READY)
    while at < len(frames):
        name_end = at + 1 + frames[at]
        value_begin = name_end + 4
        value_end = value_begin + int.from_bytes(frames[name_end:value_begin], "big")
        if frames[at + 1 : name_end].lower() == _SOCKET_TYPE:
            return frames[value_begin:value_end].decode(errors="backslashreplace")
        at = value_end
    return None
