"""TLS contexts, 1.2 or later: of a server with reloadable certificates, and of clients."""

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

from router.errors import ConfigError


class ServerTls:
    """A server's TLS context with reloadable certificate files. Raises ConfigError.

    `context`: the context for the server. `reload` applies the current files, including the
    authorities of callers, to every later handshake. `prefix`: of the settings' names, for errors.
    `protocols`: on offer, in their order (ALPN).
    """

    __slots__ = (
        "_cert_file",
        "_client_ca_file",
        "_current",
        "_key_file",
        "_prefix",
        "_protocols",
        "before_handshake",
        "context",
    )

    def __init__(
        self,
        cert_file: str,
        key_file: str,
        client_ca_file: str,
        prefix: str = "tls",
        protocols: Sequence[str] = (),
    ) -> None:
        self._prefix = prefix
        self._protocols = protocols
        self._cert_file = cert_file
        self._key_file = key_file
        self._client_ca_file = client_ca_file
        self.before_handshake: Callable[[], None] = lambda: None
        """Looks for changed files, in a process that does not watch them all the time."""
        self._current = self._read()
        self.context = self._read()
        self.context.sni_callback = self._choose

    @property
    def files(self) -> tuple[Path, ...]:
        """The files to watch."""
        named = (self._cert_file, self._key_file, self._client_ca_file)
        return tuple(Path(each) for each in named if each)

    def reload(self) -> None:
        """Read the files again. Raises ConfigError, and then keeps the previous certificates."""
        self._current = self._read()

    def _choose(self, handshake: ssl.SSLObject, _name: str | None, _: ssl.SSLContext) -> None:
        """Use the current context in a handshake; called with or without a server name."""
        self.before_handshake()
        handshake.context = self._current

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        load_certificate(context, f"{self._prefix}_cert_file", self._cert_file, self._key_file)
        if self._protocols:
            context.set_alpn_protocols(self._protocols)
        if self._client_ca_file:
            context.verify_mode = ssl.CERT_REQUIRED
            load_authorities(context, f"{self._prefix}_client_ca_file", self._client_ca_file)
        return context


def client_context(
    ca_file: str, cert_file: str, key_file: str, prefix: str = "nats_tls"
) -> ssl.SSLContext:
    """Return a context for a client that verifies the server. Raises ConfigError.

    `ca_file`: authorities; empty: the system's. `prefix`: prefix of the settings' names, for
    errors.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if ca_file else ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca_file:
        load_authorities(context, f"{prefix}_ca_file", ca_file)
    if cert_file:
        load_certificate(context, f"{prefix}_cert_file", cert_file, key_file)
    return context


def load_certificate(context: ssl.SSLContext, key: str, cert_file: str, key_file: str) -> None:
    """Load a certificate and its key. Raises ConfigError."""
    try:
        # Without a password, an encrypted key would make OpenSSL prompt on the terminal.
        context.load_cert_chain(cert_file, key_file, password=b"")
    except (OSError, ValueError) as error:
        reason = f"{cert_file} with {key_file}: {_reason(error)}"
        raise ConfigError(key, reason, "a PEM certificate and its key, unencrypted") from error


def load_authorities(context: ssl.SSLContext, key: str, ca_file: str) -> None:
    """Load the certificates of authorities. Raises ConfigError."""
    try:
        context.load_verify_locations(ca_file)
    except (OSError, ValueError) as error:
        raise ConfigError(key, f"{ca_file}: {_reason(error)}", "PEM certificates") from error


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
