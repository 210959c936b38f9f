"""TLS, 1.2 at least: of a server, whose certificate may change while it serves, and of clients."""

import ssl
from pathlib import Path

from router.errors import ConfigError


class ServerTls:
    """`context` is for the server; `reload` has the files of this moment count for every handshake
    from now on, authorities of callers included. Raises ConfigError, also at first.
    """

    __slots__ = ("_cert_file", "_client_ca_file", "_current", "_key_file", "context")

    def __init__(self, cert_file: str, key_file: str, client_ca_file: str) -> None:
        self._cert_file = cert_file
        self._key_file = key_file
        self._client_ca_file = client_ca_file
        self._current = self._read()
        self.context = self._read()
        self.context.sni_callback = self._choose

    @property
    def files(self) -> tuple[Path, ...]:
        """What to watch."""
        named = (self._cert_file, self._key_file, self._client_ca_file)
        return tuple(Path(each) for each in named if each)

    def reload(self) -> None:
        """Read the files again; the old ones count on where that fails. Raises ConfigError."""
        self._current = self._read()

    def _choose(self, handshake: ssl.SSLObject, _name: str | None, _: ssl.SSLContext) -> None:
        """Called in every handshake, with or without a server name."""
        handshake.context = self._current

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        load_certificate(context, "tls_cert_file", self._cert_file, self._key_file)
        if self._client_ca_file:
            context.verify_mode = ssl.CERT_REQUIRED
            load_authorities(context, "tls_client_ca_file", self._client_ca_file)
        return context


def client_context(
    ca_file: str, cert_file: str, key_file: str, prefix: str = "nats_tls"
) -> ssl.SSLContext:
    """For a client that checks who answers, by these authorities or the system's. Raises
    ConfigError.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca_file:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        load_authorities(context, f"{prefix}_ca_file", ca_file)
    if cert_file:
        load_certificate(context, f"{prefix}_cert_file", cert_file, key_file)
    return context


def load_certificate(context: ssl.SSLContext, key: str, cert_file: str, key_file: str) -> None:
    """Raises ConfigError."""
    try:
        # A key that asks for a password would wait for a terminal.
        context.load_cert_chain(cert_file, key_file, password=b"")
    except (OSError, ValueError) as error:
        reason = f"{cert_file} with {key_file}: {_reason(error)}"
        raise ConfigError(key, reason, "a PEM certificate and its key, unencrypted") from error


def load_authorities(context: ssl.SSLContext, key: str, ca_file: str) -> None:
    """Raises ConfigError."""
    try:
        context.load_verify_locations(ca_file)
    except (OSError, ValueError) as error:
        raise ConfigError(key, f"{ca_file}: {_reason(error)}", "PEM certificates") from error


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
