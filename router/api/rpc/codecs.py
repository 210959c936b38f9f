"""The encodings of commands and replies, selected by `Content-Type`."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import force_setattr

from router.api.batches import Decoder
from router.api.rpc.responder import head_of
from router.api.token_requests import MOST_KNOWN, TokenRequests
from router.protocol.commands import Command
from router.runtime.kernels._json_numbers import as_json
from router.runtime.kernels._msgpack import NO_SHAPE, NOT_PLAIN, find_packed_tokens
from router.runtime.process.errors import UnsupportedMediaTypeError
from router.runtime.process.json_bodies import decode_now
from router.runtime.process.msgpack_bodies import PackedFields

_NO_TOKENS = msgspec.msgpack.encode([])
_VALID = "valid application/msgpack"


class PackedCommands:
    """A reader of commands in msgpack, as `TokenRequests` is of those in JSON. Thread-safe.

    It caches which names bodies have that have no unknown field, and none twice.
    """

    __slots__ = ("_decode", "_faultless", "_known")

    def __init__(self) -> None:
        self._decode: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
        self._known = PackedFields(Command)
        self._faultless: set[tuple[type, int]] = set()

    def decode(self, body: bytes, unknown: list[str]) -> Command:
        """Return the checked command, with its tokens as an array.

        Unknown fields are added to `unknown`. Raises MalformedBodyError, InvalidFieldError.
        """
        room = np.empty(len(body), np.uint32)
        count, start, end, shape = find_packed_tokens(np.frombuffer(body, np.uint8), room)
        if count == NOT_PLAIN:
            return self._read_whole(body, unknown)
        words = b"%b%b%b" % (body[:start], _NO_TOKENS, body[end:]) if end else body
        try:
            command = self._decode(words)
            if (type(command), shape) not in self._faultless:
                unknown += self._check(command, words, shape, has_tokens=end > 0)
        except (ValueError, RecursionError):
            return self._read_whole(body, unknown)  # raises the errors of a full decode
        if end:
            force_setattr(command, "token_ids", room[:count].copy())
        return command

    def _check(
        self, command: Command, words: bytes, shape: int, *, has_tokens: bool
    ) -> tuple[str, ...]:
        """Return the unknown fields of a body.

        Raises InvalidFieldError for a duplicate field, ValueError for tokens of a command without
        a prompt.
        """
        if has_tokens and not hasattr(command, "token_ids"):
            raise ValueError("tokens are an unknown field of this command")
        names = self._known.unknown(words)
        if not names and shape != NO_SHAPE:
            if len(self._faultless) >= MOST_KNOWN:
                self._faultless.clear()
            self._faultless.add((type(command), shape))
        return names

    def _read_whole(self, body: bytes, unknown: list[str]) -> Command:
        command = decode_now(self._decode, body, _VALID)
        unknown += decode_now(self._known.unknown, body, _VALID)
        return command


class Codec:
    """One encoding of commands and replies.

    `decode`: as `PackedCommands.decode`. `decoder`: of batch items. `head`: the headers of a
    response.
    """

    def __init__(
        self,
        media_type: str,
        decoder: Decoder,
        decode: Callable[[bytes, list[str]], Command],
        encode: Callable[[Any], bytes],
    ) -> None:
        self.media_type = media_type
        self.decoder = decoder
        self.decode = decode
        self.encode = encode
        self.head = head_of({"Content-Type": media_type})


def _as_list(value: object) -> list[int]:
    """Return an array of numbers as a list."""
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} has no form in MessagePack")
    numbers: list[int] = value.tolist()
    return numbers


JSON = Codec(
    "application/json",
    msgspec.json.Decoder,
    TokenRequests[Command](Command).decode,  # type: ignore[arg-type]
    msgspec.json.Encoder(enc_hook=as_json).encode,
)
MSGPACK = Codec(
    "application/msgpack",
    msgspec.msgpack.Decoder,
    PackedCommands().decode,
    msgspec.msgpack.Encoder(enc_hook=_as_list).encode,
)

_CODECS = {
    "application/json": JSON,
    "application/msgpack": MSGPACK,
    "application/x-msgpack": MSGPACK,
    "application/vnd.msgpack": MSGPACK,
}


def codec_of(content_type: str | None) -> Codec:
    """Return the codec of a content type; JSON by default. Raises UnsupportedMediaTypeError."""
    if content_type is None:
        return JSON
    codec = _CODECS.get(content_type.partition(";")[0].strip().lower())
    if codec is None:
        raise UnsupportedMediaTypeError(content_type, (JSON.media_type, MSGPACK.media_type))
    return codec
