"""Credentials and TLS for Redis connections. The password file is read at every connection."""

import ssl
from pathlib import Path
from typing import Any

from msgspec import Struct

from router.errors import ConfigError


class RedisAccess(Struct, frozen=True):
    """Files of Redis credentials and TLS; empty values are not used."""

    username: str = ""
    password_file: str = ""
    tls_ca_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""

    def options(self, url: str, prefix: str = "redis") -> dict[str, Any]:
        """Return arguments for the client's pool. Raises ConfigError for an unreadable file.

        `prefix`: prefix of the settings' names, for errors.
        """
        options: dict[str, Any] = {}
        if self.password_file:
            options["credential_provider"] = _login(
                self.username, Path(self.password_file), f"{prefix}_password_file"
            )
        if url.startswith("rediss://"):
            options |= {
                "ssl_cert_reqs": "required",
                "ssl_check_hostname": True,
                "ssl_min_version": ssl.TLSVersion.TLSv1_2,
                "ssl_ca_certs": self.tls_ca_file or None,
                "ssl_certfile": self.tls_cert_file or None,
                "ssl_keyfile": self.tls_key_file or None,
            }
        return options


OPEN_ACCESS = RedisAccess()
"""Access without credentials, or with those in the URL."""


def _login(username: str, password_file: Path, key: str) -> Any:
    from redis.credentials import CredentialProvider

    class FromFile(CredentialProvider):
        def get_credentials(self) -> tuple[str, str] | tuple[str]:
            password = password_file.read_text().strip()
            return (username, password) if username else (password,)

    try:
        password_file.read_text()
    except OSError as error:
        reason = f"{password_file}: {error.strerror}"
        raise ConfigError(key, reason, "a readable file") from error
    return FromFile()
