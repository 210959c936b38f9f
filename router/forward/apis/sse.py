"""A splitter of server-sent event streams into whole events.

Only whole events are forwarded, so that an interrupted stream can continue on another worker.
Engines write each event at once, so this adds no delay.
"""

from router.errors import KvRouterError

_LIMIT_BYTES = 4 * 1024 * 1024


class EventTooLargeError(KvRouterError):
    """One event exceeds the buffer limit."""

    code = "event_too_large"
    http_status = 502

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"event: larger than {limit_bytes} bytes")
        self.limit_bytes = limit_bytes


class EventSplitter:
    """Splits bytes into whole events, each with its trailing empty line."""

    __slots__ = ("_begun", "_limit_bytes")

    def __init__(self, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._begun = b""
        self._limit_bytes = limit_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that end in these bytes. Raises EventTooLargeError."""
        begun = len(self._begun)
        data = self._begun + data if begun else data
        events, start, looked_at = [], 0, max(0, begun - 2)
        while end := _end(data, looked_at):
            events.append(data[start:end])
            start = looked_at = end
        self._begun = data[start:]
        if len(self._begun) > self._limit_bytes:
            raise EventTooLargeError(self._limit_bytes)
        return events


def _end(data: bytes, start: int) -> int:
    """Return the end of the first empty line that ends after `start`; 0 if there is none."""
    plain = data.find(b"\n\n", start)
    other = data.find(b"\n\r\n", start, len(data) if plain < 0 else plain + 1)
    if other >= 0:
        return other + 3
    return plain + 2 if plain >= 0 else 0


def data_of(event: bytes) -> bytes | None:
    """Return the data of an event with a single data line, otherwise None."""
    text = event.rstrip(b"\r\n")
    if not text.startswith(b"data:") or b"\n" in text:
        return None
    return text[5:].lstrip(b" ")


def named_data_of(event: bytes) -> bytes | None:
    """Return the data of an event that may have a name, an id and comments, otherwise None.

    Lines end with LF or CRLF alone: engines write other line separators of Unicode unescaped.
    """
    found: bytes | None = None
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            if found is not None:
                return None
            found = line[5:].strip(b" \r")
    return found
