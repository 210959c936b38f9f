"""How to log in to NATS, and how that is encrypted. Files are read at every connection, so that
what is in them may change.
"""

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from router.errors import ConfigError
from router.security.config import NATS_TLS, SecurityConfig
from router.security.tls import client_context


class NatsAccess(Struct, frozen=True):
    """Files with what a NATS server wants to know; empty: nothing."""

    creds_file: str = ""
    nkey_file: str = ""
    user: str = ""
    password_file: str = ""
    token_file: str = ""
    tls_ca_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""

    def options(self, url: str) -> dict[str, Any]:
        """For the client's `connect`. Raises ConfigError for what has become unreadable."""
        options: dict[str, Any] = {}
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
"""To a server that asks nobody, or whose URL says it all."""


def nats_access(config: SecurityConfig) -> NatsAccess:
    """The access that is configured. Raises ConfigError, also where a package is missing."""
    access = NatsAccess(
        config.nats_creds_file,
        config.nats_nkey_file,
        config.nats_user,
        config.nats_password_file,
        config.nats_token_file,
        *(getattr(config, key) for key in NATS_TLS),
    )
    if access.creds_file or access.nkey_file:
        _check_nkeys("nats_creds_file" if access.creds_file else "nats_nkey_file")
    access.options(config.nats_url)
    return access


def _reader(path: str) -> Callable[[], str]:
    return lambda: Path(path).read_text().strip()


def _check_nkeys(key: str) -> None:
    try:
        import nkeys  # noqa: F401
    except ImportError as error:
        raise ConfigError(key, str(error), "with kv-router[nkeys] installed") from error
