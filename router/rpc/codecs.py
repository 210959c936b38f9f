"""The encodings of commands and answers, by what `Content-Type` says."""

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from router.batches import Decoder
from router.errors import UnsupportedMediaTypeError
from router.protocol.commands import Command


class Codec(Struct, frozen=True):
    """One encoding; `decoder`: of the items of batches."""

    media_type: str
    decoder: Decoder
    decode: Callable[[bytes], Command]
    encode: Callable[[Any], bytes]


JSON = Codec(
    "application/json",
    msgspec.json.Decoder,
    msgspec.json.Decoder[Command](Command).decode,
    msgspec.json.Encoder().encode,
)
MSGPACK = Codec(
    "application/msgpack",
    msgspec.msgpack.Decoder,
    msgspec.msgpack.Decoder[Command](Command).decode,
    msgspec.msgpack.Encoder().encode,
)

_CODECS = {
    "application/json": JSON,
    "application/msgpack": MSGPACK,
    "application/x-msgpack": MSGPACK,
    "application/vnd.msgpack": MSGPACK,
}


def codec_of(content_type: str | None) -> Codec:
    """The encoding of a message; JSON unless said. Raises UnsupportedMediaTypeError."""
    if content_type is None:
        return JSON
    codec = _CODECS.get(content_type.partition(";")[0].strip().lower())
    if codec is None:
        raise UnsupportedMediaTypeError(content_type, (JSON.media_type, MSGPACK.media_type))
    return codec
