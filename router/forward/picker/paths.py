"""The paths of requests in blocks of HTTP/2 headers: all that a picker reads of gRPC's own."""

from hpack import Decoder
from hpack.exceptions import HPACKError, OversizedHeaderListError

from router.forward.picker.frames import CALM, COMPRESSION, Http2Error

MOST_HEAD_BYTES = 65_536
"""Limit of the headers of a stream, compressed and not."""

_MOST_KNOWN = 64


class PathReader:
    """A reader of the blocks of one connection, which must be read in order.

    Nearly all blocks of a gateway are the same few, which change no table of headers. Until another
    one changes it, each has the meaning that it had: reading it again is a tenth of a request.
    """

    __slots__ = ("_decoder", "_known")

    def __init__(self) -> None:
        self._decoder = Decoder(MOST_HEAD_BYTES)
        self._known: dict[bytes, bytes] = {}

    def path(self, block: bytes) -> bytes:
        """Return the path in a block, b"" without one. Raises Http2Error."""
        known = self._known.get(block)
        if known is not None:
            return known
        last, *sizes_before = self._table()
        try:
            headers = self._decoder.decode(block, raw=True)
        except OversizedHeaderListError as error:
            raise Http2Error(CALM, f"headers of more than {MOST_HEAD_BYTES} bytes") from error
        except HPACKError as error:
            raise Http2Error(COMPRESSION, f"headers: {error}") from error
        path = next((bytes(value) for name, value in headers if name == b":path"), b"")
        newest, *sizes = self._table()
        is_changed = newest is not last or sizes != sizes_before
        if is_changed or len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        if not is_changed:
            self._known[block] = path
        return path

    def _table(self) -> tuple[object, int, int]:
        """Return the newest entry of the table, the number of entries and the limit of bytes."""
        table = self._decoder.header_table
        newest = table.dynamic_entries[0] if table.dynamic_entries else None
        return newest, len(table.dynamic_entries), table.maxsize
