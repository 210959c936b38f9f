"""Frames of an engine's messages: `[topic][sequence, 8 bytes big-endian][payload]`.

Messages of a replay have an empty frame before them, and before vLLM's #45177 no topic.
"""

from collections.abc import Sequence
from typing import TypeAlias

from router.protocol.values import U64_MAX

Numbered: TypeAlias = tuple[int, bytes]
"""A sequence number and a payload."""

END_OF_REPLAY = U64_MAX
_SEQUENCE_BYTES = 8
_LIVE_FRAMES = 3


def parse_live(frames: Sequence[bytes]) -> Numbered | None:
    """Return a live batch, or None for a malformed message."""
    if len(frames) != _LIVE_FRAMES:
        return None
    numbered = _numbered(frames[1], frames[2])
    return None if numbered is None or numbered[0] == END_OF_REPLAY else numbered


def parse_replayed(frames: Sequence[bytes]) -> Numbered | None:
    """Return a replayed batch, or None for a malformed message.

    The end of a replay has the sequence END_OF_REPLAY.
    """
    if len(frames) not in (_LIVE_FRAMES, _LIVE_FRAMES + 1) or frames[0]:
        return None
    return _numbered(frames[-2], frames[-1])


def replayed_topic(frames: Sequence[bytes]) -> bytes | None:
    """Return the topic of a replayed batch, or None if the message has none."""
    return frames[1] if len(frames) > _LIVE_FRAMES else None


def replay_request(first: int) -> list[bytes]:
    """Return the frames of a DEALER socket's request for all batches from a sequence number on."""
    return [b"", first.to_bytes(_SEQUENCE_BYTES, "big")]


def _numbered(sequence: bytes, payload: bytes) -> Numbered | None:
    if len(sequence) != _SEQUENCE_BYTES:
        return None
    return int.from_bytes(sequence, "big"), payload
