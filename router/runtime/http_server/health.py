"""The `health` command: a health check of the process on this machine or in this container.

The address is taken from the process's own configuration: flags, environment and file. The exit
status is 0 if the process responds, otherwise 1.
"""

import http.client
import ssl
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct, json

from router.runtime.process.loading import first_pass

TIMEOUT_S = 2.0
ANY_ADDRESS = ("0.0.0.0", "::", "")  # noqa: S104

FIRST_PROCESS = Path("/proc/1/cmdline")
"""The command line of a container's main process."""


class HealthQuery(Struct, frozen=True):
    """The address of a process, and its TLS settings."""

    host: str
    port: int
    has_tls: bool
    wants_certificates: bool


AS_JSON = "--json"


class HealthAnswer(Struct, frozen=True):
    """The line that `--json` prints; `reason`: why the process is not healthy, or None."""

    healthy: bool
    address: str
    reason: str | None


def health(arguments: Sequence[str], environment: Mapping[str, str], prefix: str, port: int) -> int:
    """Check the process that was started with these arguments. Raises ConfigError.

    `--json` among them is of this command. `port`: its default port. Returns the exit status.
    """
    asked = health_query_at(arguments, environment, prefix, port)
    reason, address = problem(asked), f"{asked.host}:{asked.port}"
    if AS_JSON in arguments:
        answer = HealthAnswer(reason is None, address, reason)
        sys.stdout.write(json.encode(answer).decode() + "\n")
    elif reason is not None:
        sys.stderr.write(f"not healthy: {address}: {reason}\n")
    return 0 if reason is None else 1


def process_of(arguments: Sequence[str], program: str, usual: str) -> list[str]:
    """Return the command to check, with its options, and `--json` behind it if that is given."""
    given = [each for each in arguments if each != AS_JSON]
    found = given or started_with(program) or [usual]
    return [*found, AS_JSON] if AS_JSON in arguments else found


def health_query_at(
    arguments: Sequence[str], environment: Mapping[str, str], prefix: str, port: int
) -> HealthQuery:
    """Return the address of a process with these arguments. Raises ConfigError."""
    look = partial(first_pass, arguments=arguments, environment=environment, prefix=prefix)
    host = str(look("host") or "127.0.0.1")
    return HealthQuery(
        "127.0.0.1" if host in ANY_ADDRESS else host,
        int(str(look("http_port") or port)),
        bool(look("tls_cert_file")),
        bool(look("tls_client_ca_file")),
    )


def problem(asked: HealthQuery) -> str | None:
    """Return the reason why a process is not healthy, or None if it is."""
    connection = _connection(asked)
    try:
        connection.connect()
        if asked.wants_certificates:
            # This command has no client certificate: completing the connection is proof enough.
            return None
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
    """Return the arguments of the container's main process if it is this program, else none."""
    try:
        words = first_process.read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []
    places = [place for place, word in enumerate(words) if Path(word).name == program]
    return words[places[0] + 1 :] if places else []


def _connection(asked: HealthQuery) -> http.client.HTTPConnection:
    if not asked.has_tls:
        return http.client.HTTPConnection(asked.host, asked.port, timeout=TIMEOUT_S)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The peer is this process's own server; its certificate is issued for another name.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(asked.host, asked.port, timeout=TIMEOUT_S, context=context)
