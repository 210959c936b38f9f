"""Settings of every listening process: authentication, encryption and limits.

Secrets are read from files, so that no command line, environment or configuration shows them. The
one secret that may be given as a setting (`block_key`) is never shown.
"""

from collections.abc import Mapping
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from msgspec import Struct

from router.errors import ConfigError
from router.runtime.kernels.hash_key import BlockKey
from router.runtime.process.redaction import SECRET, redact
from router.runtime.process.setting_rules import ConflictRule, check_rules
from router.runtime.process.settings import COMMON, LIVE, about, settings_of
from router.runtime.security.secret_files import read_block_key


class SecurityConfig(Struct, frozen=True, kw_only=True):
    """Address to listen on, authentication and TLS."""

    GROUP: ClassVar[str] = "listening"

    host: Annotated[
        str,
        about(
            "address to listen on; any but loopback needs token_file, "
            "tls_client_ca_file or insecure_public_bind",
            COMMON,
            min_length=1,
        ),
    ] = "127.0.0.1"
    insecure_public_bind: Annotated[
        bool,
        about(
            "listen on a public address without authentication; only for networks "
            "closed to untrusted hosts"
        ),
    ] = False
    token_file: Annotated[
        str,
        about(
            "file of bearer tokens, read again when it changes; empty: no tokens required", COMMON
        ),
    ] = ""
    default_requests_per_s: Annotated[
        float,
        about(
            "requests per second for each token that has no limit of its own; 0: unlimited",
            LIVE,
            ge=0,
        ),
    ] = 0.0
    open_requests_per_s: Annotated[
        float,
        about(
            "requests per second for each address without a token, of routes that need none "
            "(documentation, the dashboard's files) apart from /health and /ready; 0: unlimited",
            LIVE,
            ge=0,
        ),
    ] = 50.0
    tls_cert_file: Annotated[
        str, about("PEM certificate (chain) of HTTPS; empty: HTTP without TLS", COMMON)
    ] = ""
    tls_key_file: Annotated[str, about("PEM file of the certificate's private key", COMMON)] = ""
    tls_client_ca_file: Annotated[
        str,
        about(
            "PEM file of certificate authorities; callers must present a "
            "certificate signed by one of them"
        ),
    ] = ""


class NatsConfig(Struct, frozen=True, kw_only=True):
    """Credentials and TLS for NATS."""

    GROUP: ClassVar[str] = "NATS"

    nats_creds_file: Annotated[
        str, about("NATS credentials: a user's JWT and seed, as nsc writes them")
    ] = ""
    nats_nkey_file: Annotated[str, about("NATS nkey: a user's seed")] = ""
    nats_user: Annotated[str, about("NATS user, with nats_password_file")] = ""
    nats_password_file: Annotated[str, about("file with that user's password")] = ""
    nats_token_file: Annotated[str, about("file with a NATS token")] = ""
    nats_tls_ca_file: Annotated[
        str, about("PEM file of certificate authorities for tls://; empty: the system's")
    ] = ""
    nats_tls_cert_file: Annotated[str, about("PEM certificate for NATS")] = ""
    nats_tls_key_file: Annotated[str, about("PEM file of the certificate's private key")] = ""
    nats_inbox_prefix: Annotated[
        str,
        about(
            "subject under which NATS responses are received, if this process's NATS user may "
            "subscribe to no other (deploy/nats/users.conf)",
            pattern=r"^_INBOX(\.[A-Za-z0-9_-]{1,64}){0,4}$",
            unit="SUBJECT",
            form="_INBOX, with up to four further words: _INBOX.router",
        ),
    ] = "_INBOX"


class BlockKeyConfig(Struct, frozen=True, kw_only=True):
    """The fleet's secret key."""

    GROUP: ClassVar[str] = "NATS"

    block_key_file: Annotated[
        str, about("file with the fleet's secret key, from which block hashes on the bus derive")
    ] = ""
    block_key: Annotated[
        str, about("the secret key itself, for environments without files", SECRET, unit="KEY")
    ] = ""

    def read(self) -> BlockKey | None:
        """Return the key, or None if there is none. Raises ConfigError."""
        return read_block_key(self.block_key_file, self.block_key)


NATS_SCHEMES = ("nats", "tls", "ws", "wss")
NATS_LOGINS = ("nats_creds_file", "nats_nkey_file", "nats_user", "nats_token_file")
NATS_TLS = ("nats_tls_ca_file", "nats_tls_cert_file", "nats_tls_key_file")
FILES = (
    "token_file",
    "tls_cert_file",
    "tls_key_file",
    "tls_client_ca_file",
    "nats_creds_file",
    "nats_nkey_file",
    "nats_password_file",
    "nats_token_file",
    *NATS_TLS,
    "block_key_file",
)


def _needs(key: str, other: str, why: str) -> ConflictRule:
    return ConflictRule(key, other, lambda c: bool(getattr(c, key)) and not getattr(c, other), why)


def _excludes(key: str, other: str, why: str) -> ConflictRule:
    return ConflictRule(
        key, other, lambda c: bool(getattr(c, key)) and bool(getattr(c, other)), why
    )


def _needs_tls_url(key: str) -> ConflictRule:
    return ConflictRule(
        key,
        "nats_url",
        lambda c: bool(getattr(c, key)) and not c.nats_url.startswith("tls://"),
        "only a tls:// URL guarantees TLS",
    )


CERTIFICATE_RULES = (
    _needs("tls_cert_file", "tls_key_file", "a certificate requires its key"),
    _needs("tls_key_file", "tls_cert_file", "a key requires its certificate"),
)
RULES: tuple[ConflictRule, ...] = (
    *CERTIFICATE_RULES,
    _needs("tls_client_ca_file", "tls_cert_file", "client certificates require HTTPS"),
    _needs("nats_user", "nats_password_file", "a user requires a password"),
    _needs("nats_password_file", "nats_user", "a password requires a user"),
    _needs("nats_tls_cert_file", "nats_tls_key_file", "a certificate requires its key"),
    _needs("nats_tls_key_file", "nats_tls_cert_file", "a key requires its certificate"),
    _excludes("block_key_file", "block_key", "both contain the same secret"),
    *(_needs(key, "nats_url", "credentials require a NATS server") for key in NATS_LOGINS),
    *(_needs_tls_url(key) for key in NATS_TLS),
    *(
        _excludes(key, other, "only one login is allowed")
        for index, key in enumerate(NATS_LOGINS)
        for other in NATS_LOGINS[index + 1 :]
    ),
    *(
        ConflictRule(
            key,
            "nats_url",
            lambda c, key=key: bool(getattr(c, key)) and "@" in c.nats_url,  # type: ignore[misc]
            "only one login is allowed, and this URL contains one",
        )
        for key in NATS_LOGINS
    ),
)


def check_security(
    config: Struct, security: SecurityConfig, block_keys: BlockKeyConfig, sources: Mapping[str, str]
) -> None:
    """Raise ConfigError for contradictory or unreadable settings, or accidental public access.

    `security`, `block_keys`: sections of the configuration.
    """
    check_rules(RULES, config, sources)
    values = {each.name: each.value for each in settings_of(config)}
    for key in FILES:
        check_readable(key, values[key])
    if block_keys != BlockKeyConfig():
        _ = block_keys.read()
    check_nats_url("nats_url", values["nats_url"])
    _check_bind(security)


def is_ip_address(host: str) -> bool:
    """Return whether a host is an address, not a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a listening address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_for_itself(config: SecurityConfig) -> bool:
    """Return whether only processes of this machine may send requests, without authentication.

    In that case the Host header is checked too: a web page in a local browser could reach the
    server by a host name of its own that resolves to this address (DNS rebinding).
    """
    has_callers = bool(config.token_file or config.tls_client_ca_file)
    return is_loopback(config.host) and not has_callers and not config.insecure_public_bind


@lru_cache(maxsize=64)
def is_local_name(authority: bytes) -> bool:
    """Return whether a Host header cannot be the name of a public web site.

    True for an IP address, a name without dots, `localhost` and names below it.
    """
    text = authority.decode("latin-1").lower()
    host = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
    return "." not in host or host.endswith(".localhost") or is_ip_address(host)


def _check_bind(config: SecurityConfig) -> None:
    has_callers = bool(config.token_file or config.tls_client_ca_file)
    if is_loopback(config.host) or has_callers or config.insecure_public_bind:
        return
    reason = f"{config.host!r} can be reached from other machines without authentication"
    allowed = (
        "127.0.0.1; token_file or tls_client_ca_file, to require authentication; "
        "insecure_public_bind, on a network closed to untrusted hosts"
    )
    raise ConfigError("host", reason, allowed)


def check_nats_url(key: str, url: str) -> None:
    """Raise ConfigError unless a URL is empty or names one server; a bare host is allowed."""
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        is_one = parts.scheme in NATS_SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_one = False
    if url and not is_one:
        raise ConfigError(key, repr(redact(url)), "nats://host:port of one server, or tls://…")


def check_readable(key: str, path: str) -> None:
    """Raise ConfigError if a path is set and its file cannot be read."""
    if path:
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(key, f"{path}: {error.strerror}", "a readable file") from error
