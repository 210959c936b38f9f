"""Requests as bytes. What no header may have is not sent: there is one way to read them."""

from functools import lru_cache
from urllib.parse import urlsplit

from msgspec import Struct

from router.errors import InvalidFieldError

_DEFAULT_PORTS = {"http": 80, "https": 443}


class Origin(Struct, frozen=True):
    """Where a server listens; `prefix`: the path before all of its own."""

    scheme: str
    host: str
    port: int
    prefix: str = ""

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(url: str) -> "Origin":
        """Of a URL. Raises InvalidFieldError for one that is no server's."""
        try:
            parts = urlsplit(url)
            port = parts.port or _DEFAULT_PORTS[parts.scheme]
        except (ValueError, KeyError) as error:
            raise InvalidFieldError("endpoint", repr(url), "http://host:port") from error
        if not parts.hostname or not url.isascii() or not url.isprintable() or " " in url:
            raise InvalidFieldError("endpoint", repr(url), "http://host:port")
        return Origin(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        """As the Host header says it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        is_default = _DEFAULT_PORTS[self.scheme] == self.port
        return host if is_default else f"{host}:{self.port}"


class Request(Struct, frozen=True):
    """What to ask. Headers are names in lower case.

    `is_repeatable`: doing it twice is as good as once, where a connection that was kept proves to
    be closed.
    """

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    is_repeatable: bool = False

    def encoded(self, origin: Origin) -> bytes:
        """The bytes to send: head and body in one piece. Raises InvalidFieldError for a header
        that would be read as two.
        """
        lines = b"".join([b"%b: %b\r\n" % pair for pair in self.headers])
        if lines.count(b"\n") != len(self.headers) or lines.count(b"\r") != len(self.headers):
            raise InvalidFieldError("headers", "a line break in a header", "one line each")
        first = _first_lines(self.method, origin, self.path)
        return b"%b%bcontent-length: %d\r\n\r\n%b" % (first, lines, len(self.body), self.body)


@lru_cache(maxsize=1024)
def _first_lines(method: str, origin: Origin, path: str) -> bytes:
    line = f"{method} {origin.prefix}{path} HTTP/1.1\r\nhost: {origin.authority}\r\n"
    return line.encode("ascii")
