"""Settings of every process that others can reach: who may, how it is encrypted, how much at once.

Secrets are in files, so that no command line, environment or configuration shows them; the one that
may be given as a setting (`block_key`) is never shown.
"""

from collections.abc import Mapping
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from router.contradictions import Rule, check_rules
from router.errors import ConfigError
from router.masking import SECRET, masked
from router.security.block_keys import BlockKey, read_block_key


class SecurityConfig(Struct, frozen=True, kw_only=True):
    """What every process that listens can be told of whom to trust."""

    host: Annotated[
        str,
        Meta(
            min_length=1,
            description=(
                "address to listen on; any but loopback needs token_file, "
                "tls_client_ca_file or insecure_public_bind"
            ),
        ),
    ] = "127.0.0.1"
    insecure_public_bind: Annotated[
        bool,
        Meta(
            description=(
                "listen on a public address without authentication; only for networks "
                "that are closed to strangers"
            )
        ),
    ] = False
    token_file: Annotated[
        str,
        Meta(
            description=(
                "file of bearer tokens, read again when it changes; empty: no tokens are needed"
            )
        ),
    ] = ""
    default_requests_per_s: Annotated[
        float,
        Meta(
            ge=0,
            description=(
                "requests per second for each token that has no limit of its own; 0: unlimited"
            ),
        ),
    ] = 0.0
    tls_cert_file: Annotated[
        str, Meta(description="PEM certificate (chain) of HTTPS; empty: HTTP without TLS")
    ] = ""
    tls_key_file: Annotated[str, Meta(description="PEM file of the certificate's private key")] = ""
    tls_client_ca_file: Annotated[
        str,
        Meta(
            description=(
                "PEM file of certificate authorities; callers must present a "
                "certificate signed by one of them"
            )
        ),
    ] = ""
    header_limit_bytes: Annotated[
        int,
        Meta(ge=1024, le=1 << 20, description="size of request line and headers; beyond that, 431"),
    ] = 32 * 1024
    max_headers: Annotated[
        int, Meta(ge=8, le=10_000, description="number of headers of a request; beyond that, 431")
    ] = 100
    header_timeout_s: Annotated[
        float, Meta(gt=0, description="time to receive the headers; beyond that, 408 and closed")
    ] = 10.0
    keep_alive_s: Annotated[
        float,
        Meta(
            gt=0,
            description=(
                "an idle connection is closed after this time; set it above the idle "
                "timeout of callers, or they may lose a request"
            ),
        ),
    ] = 75.0
    max_requests: Annotated[
        int,
        Meta(
            ge=1, description="requests in flight, including those in the queue; beyond that, 503"
        ),
    ] = 4096
    nats_url: Annotated[str, Meta(description="NATS server with JetStream")] = ""
    nats_creds_file: Annotated[
        str, Meta(description="NATS credentials: a user's JWT and seed, as nsc writes them")
    ] = ""
    nats_nkey_file: Annotated[str, Meta(description="NATS nkey: a user's seed")] = ""
    nats_user: Annotated[str, Meta(description="NATS user, with nats_password_file")] = ""
    nats_password_file: Annotated[str, Meta(description="file with that user's password")] = ""
    nats_token_file: Annotated[str, Meta(description="file with a NATS token")] = ""
    nats_tls_ca_file: Annotated[
        str, Meta(description="PEM file of certificate authorities for tls://; empty: the system's")
    ] = ""
    nats_tls_cert_file: Annotated[str, Meta(description="PEM certificate for NATS")] = ""
    nats_tls_key_file: Annotated[
        str, Meta(description="PEM file of the certificate's private key")
    ] = ""
    block_key_file: Annotated[
        str,
        Meta(
            description=(
                "file with the fleet's secret key, with which block hashes on the bus are made"
            )
        ),
    ] = ""
    block_key: Annotated[
        str,
        Meta(description="the secret key itself, for environments without files", extra=SECRET),
    ] = ""

    @property
    def read_block_key(self) -> BlockKey | None:
        """The fleet's secret, if it has one. Raises ConfigError."""
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


def _needs(key: str, other: str, why: str) -> Rule[SecurityConfig]:
    return Rule(key, other, lambda c: bool(getattr(c, key)) and not getattr(c, other), why)


def _excludes(key: str, other: str, why: str) -> Rule[SecurityConfig]:
    return Rule(key, other, lambda c: bool(getattr(c, key)) and bool(getattr(c, other)), why)


def _needs_tls_url(key: str) -> Rule[SecurityConfig]:
    return Rule(
        key,
        "nats_url",
        lambda c: bool(getattr(c, key)) and not c.nats_url.startswith("tls://"),
        "only tls:// is never answered without TLS",
    )


RULES: tuple[Rule[SecurityConfig], ...] = (
    _needs("tls_cert_file", "tls_key_file", "a certificate is proven by its key"),
    _needs("tls_key_file", "tls_cert_file", "a key proves a certificate"),
    _needs("tls_client_ca_file", "tls_cert_file", "callers show certificates to HTTPS alone"),
    _needs("nats_user", "nats_password_file", "a user has a password"),
    _needs("nats_password_file", "nats_user", "a password is a user's"),
    _needs("nats_tls_cert_file", "nats_tls_key_file", "a certificate is proven by its key"),
    _needs("nats_tls_key_file", "nats_tls_cert_file", "a key proves a certificate"),
    _excludes("block_key_file", "block_key", "they are two places of one secret"),
    *(_needs(key, "nats_url", "there is no bus to log in to") for key in NATS_LOGINS),
    *(_needs_tls_url(key) for key in NATS_TLS),
    *(
        _excludes(key, other, "one login is enough")
        for index, key in enumerate(NATS_LOGINS)
        for other in NATS_LOGINS[index + 1 :]
    ),
    *(
        Rule(
            key,
            "nats_url",
            lambda c, key=key: bool(getattr(c, key)) and "@" in c.nats_url,  # type: ignore[misc]
            "one login is enough, and this URL has one",
        )
        for key in NATS_LOGINS
    ),
)


def check_security(config: SecurityConfig, sources: Mapping[str, str]) -> None:
    """Refuse what contradicts itself, what cannot be read, and to be open to all by accident.
    Raises ConfigError.
    """
    check_rules(RULES, config, sources)
    for key in FILES:
        check_readable(key, getattr(config, key))
    if config.block_key_file or config.block_key:
        _ = config.read_block_key
    check_nats_url("nats_url", config.nats_url)
    _check_bind(config)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address to listen on."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_for_itself(config: SecurityConfig) -> bool:
    """Whether only this machine may ask, whoever it is there. A page that one of its browsers shows
    is not meant: it comes by the name of its own server, which it had changed to our address.
    """
    has_callers = bool(config.token_file or config.tls_client_ca_file)
    return is_loopback(config.host) and not has_callers and not config.insecure_public_bind


@lru_cache(maxsize=64)
def is_local_name(authority: bytes) -> bool:
    """Whether a Host header cannot be the name of somebody's site: an address, a name without
    dots, `localhost` and what is below it.
    """
    text = authority.decode("latin-1").lower()
    host = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
    if "." not in host or host.endswith(".localhost"):
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _check_bind(config: SecurityConfig) -> None:
    has_callers = bool(config.token_file or config.tls_client_ca_file)
    if is_loopback(config.host) or has_callers or config.insecure_public_bind:
        return
    reason = (
        f"{config.host!r} can be reached from other machines, and callers would not have to say "
        "who they are"
    )
    allowed = (
        "127.0.0.1; token_file or tls_client_ca_file, so that they have to; "
        "insecure_public_bind, if the network keeps others out"
    )
    raise ConfigError("host", reason, allowed)


def check_nats_url(key: str, url: str) -> None:
    """One server's, if it is set; a bare host is one as well. Raises ConfigError."""
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        is_one = parts.scheme in NATS_SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_one = False
    if url and not is_one:
        raise ConfigError(key, repr(masked(url)), "nats://host:port of one server, or tls://…")


def check_readable(key: str, path: str) -> None:
    """A file that a setting names, if it does. Raises ConfigError."""
    if path:
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(key, f"{path}: {error.strerror}", "a readable file") from error
