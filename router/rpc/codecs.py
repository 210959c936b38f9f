"""The encodings of commands and answers, by what `Content-Type` says."""

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from router.batches import Decoder
from router.body_errors import UnsupportedMediaTypeError
from router.process.fields import KnownFields, structs_of
from router.process.packed_fields import PackedFields
from router.protocol.commands import Command


class Said(Struct, frozen=True):
    """A command, and the fields beside it that nobody knows."""

    command: Command
    unknown: tuple[str, ...]


class Codec:
    """One encoding; `decoder`: of the items of batches, `fields`: looks at those of a body."""

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
        """What a body says. Raises what the decoder does, and InvalidFieldError."""
        command = self._decode(body)
        return Said(command, self._fields[type(command)].unknown(body))


JSON = Codec("application/json", msgspec.json.Decoder, KnownFields, msgspec.json.Encoder().encode)
MSGPACK = Codec(
    "application/msgpack", msgspec.msgpack.Decoder, PackedFields, msgspec.msgpack.Encoder().encode
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
