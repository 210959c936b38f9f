"""Credentials for connections to a router or an indexer, and the authorities of its TLS."""

from pathlib import Path
from typing import Any

from msgspec import Struct

from router.errors import ConfigError
from router.runtime.security.tls import client_context


class HttpAccess(Struct, frozen=True):
    """Files of a bearer token and of TLS; empty values are not used."""

    token_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""

    def options(self, prefix: str) -> dict[str, Any]:
        """Return arguments for httpx clients. Raises ConfigError.

        `prefix`: prefix of the settings' names, for errors.
        """
        options: dict[str, Any] = {
            "verify": client_context(self.ca_file, self.cert_file, self.key_file, f"{prefix}_tls")
        }
        if self.token_file:
            options["headers"] = {"authorization": f"Bearer {self._token(prefix)}"}
        return options

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
