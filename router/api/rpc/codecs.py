"""The encodings of commands and replies, selected by `Content-Type`."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from router.api.batches import Decoder
from router.protocol.commands import Command
from router.runtime.kernels._json_numbers import as_json
from router.runtime.process.errors import UnsupportedMediaTypeError
from router.runtime.process.json_bodies import KnownFields, structs_of
from router.runtime.process.msgpack_bodies import PackedFields


class Said(Struct, frozen=True):
    """A command, and the unknown fields beside it."""

    command: Command
    unknown: tuple[str, ...]


class Codec:
    """One encoding; `decoder`: of batch items, `fields`: check of the fields of a body."""

    def __init__(
        self,
        media_type: str,
        decoder: Decoder,
        fields: type[KnownFields] | type[PackedFields],
        encode: Callable[[Any], bytes],
    ) -> None:
        self.media_type = media_type
        self.decoder = decoder
        self.encode = encode
        self._decode: Callable[[bytes], Command] = decoder(Command).decode
        self._fields = {each: fields(each) for each in structs_of(Command)}

    def decode(self, body: bytes) -> Said:
        """Decode a body. Raises what the decoder raises, and InvalidFieldError."""
        command = self._decode(body)
        return Said(command, self._fields[type(command)].unknown(body))


def _as_list(value: object) -> list[int]:
    """Return an array of numbers as a list."""
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} has no form in MessagePack")
    numbers: list[int] = value.tolist()
    return numbers


JSON = Codec(
    "application/json",
    msgspec.json.Decoder,
    KnownFields,
    msgspec.json.Encoder(enc_hook=as_json).encode,
)
MSGPACK = Codec(
    "application/msgpack",
    msgspec.msgpack.Decoder,
    PackedFields,
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
