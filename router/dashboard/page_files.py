"""The files of the page, read from the package, with their HTTP headers."""

from hashlib import sha256
from importlib.resources import files

from msgspec import Struct

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""Headers that forbid external resources, and embedding of the page in a frame."""


class PageFile(Struct, frozen=True):
    """A file and its headers; `etag` changes with its content."""

    content: bytes
    etag: str
    headers: dict[str, str]

    def is_known(self, if_none_match: str | None) -> bool:
        """Return whether a browser has this content already."""
        etags = [each.strip().removeprefix("W/") for each in (if_none_match or "").split(",")]
        return self.etag in etags or "*" in etags


def page_files() -> dict[str, PageFile]:
    """Return all files of the page (100 KB), by name. Read once, when a router starts."""
    folder = files("router.dashboard") / "page"
    return {
        each.name: _page_file(each.name, each.read_bytes())
        for each in folder.iterdir()
        if each.name.rpartition(".")[2] in _TYPES
    }


def _page_file(name: str, content: bytes) -> PageFile:
    etag = f'"{sha256(content).hexdigest()[:32]}"'
    headers = {
        **SECURITY_HEADERS,
        "content-type": _TYPES[name.rpartition(".")[2]],
        "cache-control": "no-cache",
        "etag": etag,
    }
    return PageFile(content, etag, headers)
