"""Credentials for connections to servers, and the authorities of their TLS."""

import os
import ssl
from pathlib import Path
from typing import Any

from msgspec import Struct

from router.errors import ConfigError
from router.runtime.security.edge import WatchedFiles
from router.runtime.security.tls import client_context


class HttpAccess(Struct, frozen=True):
    """Files of a bearer token and of TLS; empty values are not used."""

    token_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""

    def options(self, prefix: str, url: str) -> dict[str, Any]:
        """Return arguments for an httpx client of a server. Raises ConfigError.

        `prefix`: prefix of the settings' names, for errors.
        """
        headers = self.headers(prefix)
        return {"verify": self._tls(prefix, url)} | ({"headers": headers} if headers else {})

    def _tls(self, prefix: str, url: str) -> ssl.SSLContext:
        """Return a context, for a URL without TLS one that trusts no server.

        To read the system's authorities takes 65 ms.
        """
        files = (self.ca_file, self.cert_file, self.key_file)
        if any(files) or not url.lower().startswith("http:"):
            return client_context(*files, f"{prefix}_tls")
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    def headers(self, prefix: str) -> dict[str, str]:
        """Return the headers of each request, which are credentials. Raises ConfigError."""
        return {"authorization": f"Bearer {self._token(prefix)}"} if self.token_file else {}

    def _token(self, prefix: str) -> str:
        key, allowed = f"{prefix}_token_file", "a readable file with a token, in ASCII"
        try:
            token = Path(self.token_file).read_text("ascii").strip()
        except OSError as error:
            raise ConfigError(key, f"{self.token_file}: {error.strerror}", allowed) from error
        except UnicodeDecodeError as error:
            raise ConfigError(key, f"{self.token_file}: not ASCII", allowed) from error
        if not token or not token.isprintable():
            raise ConfigError(key, f"{self.token_file}: contains no token", allowed)
        return token


OPEN_ACCESS = HttpAccess()


class ClientTls:
    """The TLS context of a pool of connections: made once, and again after its files have changed.

    `ca_file`: authorities; empty: the system's. Without files, an unused one reads nothing.
    """

    __slots__ = ("_context", "_files", "_prefix", "_watched")

    def __init__(
        self, ca_file: str = "", cert_file: str = "", key_file: str = "", prefix: str = "tls"
    ) -> None:
        """Raise ConfigError for files that cannot be used.

        `prefix`: prefix of the settings' names, for errors.
        """
        self._files = (ca_file, cert_file, key_file)
        self._prefix = prefix
        named = [Path(each) for each in self._files if each]
        watched = named if ca_file else [*named, *_system_authorities()]
        self._watched = WatchedFiles(f"{prefix} files of a client", watched, self._reload)
        self._context = self._read() if any(self._files) else None

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection. Files that cannot be read change nothing."""
        if self._context is None:
            self._context = self._read()
        self._watched.look()
        return self._context

    def _reload(self) -> None:
        if not self._files[0] and not any(each.exists() for each in _system_authorities()):
            raise ConfigError(f"{self._prefix}_ca_file", "the system has none", "authorities")
        self._context = self._read()

    def _read(self) -> ssl.SSLContext:
        return client_context(*self._files, prefix=self._prefix)


def _system_authorities() -> list[Path]:
    """Return the file and the folder of the system's authorities, whether they exist or not."""
    paths = ssl.get_default_verify_paths()
    file = os.environ.get(paths.openssl_cafile_env, paths.openssl_cafile)
    folder = os.environ.get(paths.openssl_capath_env, paths.openssl_capath)
    return [Path(file), Path(folder)]
