"""Credentials and TLS for NATS connections.

Files are read at every connection, so that their contents may change.
"""

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple

from router.errors import ConfigError
from router.runtime.security.config import NatsConfig
from router.runtime.security.tls import client_context


class NatsAccess(Struct, frozen=True):
    """Files of NATS credentials and TLS; empty values are not used.

    `inbox_prefix`: the beginning of the subjects of responses; it must be `_INBOX`, or below it.
    """

    creds_file: str = ""
    nkey_file: str = ""
    user: str = ""
    password_file: str = ""
    token_file: str = ""
    tls_ca_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    inbox_prefix: str = "_INBOX"

    def options(self, url: str) -> dict[str, Any]:
        """Return arguments for the client's `connect`. Raises ConfigError for unreadable files."""
        options: dict[str, Any] = {"inbox_prefix": self.inbox_prefix}
        if self.creds_file:
            options["user_credentials"] = self.creds_file
        if self.nkey_file:
            options["nkeys_seed"] = self.nkey_file
        if self.user:
            options |= {"user": self.user, "password": _reader(self.password_file)}
        if self.token_file:
            options["token"] = _reader(self.token_file)
        if url.startswith("tls://"):
            options["tls"] = self._tls()
        return options

    def _tls(self) -> ssl.SSLContext:
        return client_context(self.tls_ca_file, self.tls_cert_file, self.tls_key_file)


OPEN_ACCESS = NatsAccess()
"""Access without credentials, or with those in the URL."""


def nats_access(config: NatsConfig, url: str) -> NatsAccess:
    """Return the configured access. Raises ConfigError, also if a package is missing."""
    access = NatsAccess(*astuple(config))
    if access.creds_file or access.nkey_file:
        _check_nkeys("nats_creds_file" if access.creds_file else "nats_nkey_file")
    access.options(url)
    return access


def _reader(path: str) -> Callable[[], str]:
    return lambda: Path(path).read_text().strip()


def _check_nkeys(key: str) -> None:
    try:
        import nkeys  # noqa: F401
    except ImportError as error:
        raise ConfigError(key, str(error), "with kv-router[nkeys] installed") from error
