"""`health`: does the process that this machine or container runs live? For its HEALTHCHECK.

It is asked as its own configuration says: that of the flags, environment and file it was started
with. Exit status: 0 if it does, else 1.
"""

import http.client
import ssl
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct

from router.process.settings import first_look

TIMEOUT_S = 2.0
ANY_ADDRESS = ("0.0.0.0", "::", "")  # noqa: S104

FIRST_PROCESS = Path("/proc/1/cmdline")
"""Of a container: its own."""


class Asked(Struct, frozen=True):
    """Where a process is to be asked."""

    host: str
    port: int
    has_tls: bool
    wants_certificates: bool


def health(arguments: Sequence[str], environment: Mapping[str, str], prefix: str, port: int) -> int:
    """Ask the process that was started with these arguments; its `port` unless it says another.
    Raises ConfigError.
    """
    reason = problem(asked_at(arguments, environment, prefix, port))
    if reason is not None:
        sys.stderr.write(f"not healthy: {reason}\n")
    return 0 if reason is None else 1


def asked_at(
    arguments: Sequence[str], environment: Mapping[str, str], prefix: str, port: int
) -> Asked:
    """Where a process with these arguments listens. Raises ConfigError."""
    look = partial(first_look, arguments=arguments, environment=environment, prefix=prefix)
    host = str(look("host") or "127.0.0.1")
    return Asked(
        "127.0.0.1" if host in ANY_ADDRESS else host,
        int(str(look("http_port") or port)),
        bool(look("tls_cert_file")),
        bool(look("tls_client_ca_file")),
    )


def problem(asked: Asked) -> str | None:
    """Why a process does not live; None: it does."""
    connection = _connection(asked)
    try:
        connection.connect()
        if asked.wants_certificates:
            return None  # which we have none of: that TLS is answered proves as much
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except ssl.SSLError as error:
        return None if asked.wants_certificates else str(error)
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()
    return None if status == 200 else f"status {status}"


def started_with(program: str, first_process: Path = FIRST_PROCESS) -> list[str]:
    """The arguments of the container's own process, if that is this program; else none."""
    try:
        words = first_process.read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []
    places = [place for place, word in enumerate(words) if Path(word).name == program]
    return words[places[0] + 1 :] if places else []


def _connection(asked: Asked) -> http.client.HTTPConnection:
    if not asked.has_tls:
        return http.client.HTTPConnection(asked.host, asked.port, timeout=TIMEOUT_S)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # It is ourselves, under whatever name the certificate is for.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(asked.host, asked.port, timeout=TIMEOUT_S, context=context)
