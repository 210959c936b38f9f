"""The security of an HTTP server: tokens and certificates, their files, and its metrics."""

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias, get_args

from router.errors import ConfigError
from router.runtime.process.metrics import Rows, counter, gauge
from router.runtime.process.reload import Outcome
from router.runtime.security.config import SecurityConfig
from router.runtime.security.guard import Guard
from router.runtime.security.tls import ServerTls
from router.runtime.security.tokens import KEY, read_tokens

log = logging.getLogger(__name__)

POLL_S = 1.0

Signature: TypeAlias = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles:
    """A set of files that are reloaded together.

    `reload` reads them, and raises ConfigError. `failures`: number of failed reloads.
    """

    __slots__ = ("_files", "_reload", "_seen", "failures", "what")

    def __init__(self, what: str, files: Sequence[Path], reload: Callable[[], None]) -> None:
        self.what = what
        self.failures = 0
        self._files = tuple(files)
        self._reload = reload
        self._seen = self._signature()

    def look(self) -> None:
        """Reload the files if they have changed."""
        if self._signature() != self._seen:
            self.read()

    def read(self) -> str:
        """Reload the files, changed or not. Returns a line about the result."""
        self._seen = self._signature()
        try:
            self._reload()
        except ConfigError as error:
            self.failures += 1
            log.error("%s not reloaded, the previous contents stay in effect: %s", self.what, error)
            return f"{self.what}: not reloaded, the previous contents stay in effect"
        log.info("%s: read again", self.what)
        return f"{self.what}: read again"

    def _signature(self) -> Signature:
        """Return modification time, size and inode of each file; None for a missing one."""
        return tuple(_signature(path) for path in self._files)


async def watch_forever(watched: Sequence[WatchedFiles]) -> None:
    """Check all files for changes every `POLL_S` seconds, until cancelled."""
    while True:
        await asyncio.sleep(POLL_S)
        for files in watched:
            files.look()


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class Edge:
    """The guard and the TLS context of a server, built from its settings. Raises ConfigError.

    `guard`: admits requests. `tls`: the server's TLS context; None without TLS. `watched`: files
    that are read again when they change. `reloads`: of the configuration, by outcome.
    """

    def __init__(self, config: SecurityConfig) -> None:
        self._rates = (config.default_requests_per_s, config.open_requests_per_s)
        self.guard = Guard(*self._rates)
        self.tls: ssl.SSLContext | None = None
        self.watched: list[WatchedFiles] = []
        self.reloads: dict[str, int] = dict.fromkeys(get_args(Outcome), 0)
        if config.token_file:
            self._watch_tokens(Path(config.token_file))
        if config.tls_cert_file:
            tls = ServerTls(config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file)
            self.tls = tls.context
            self.watched.append(WatchedFiles("certificates", tls.files, tls.reload))

    async def run(self) -> None:
        """Watch the files until cancelled."""
        await watch_forever(self.watched)

    def reconfigure(self, config: SecurityConfig) -> None:
        """Apply changed rates; see `settings.LIVE`."""
        rates = (config.default_requests_per_s, config.open_requests_per_s)
        if rates != self._rates:
            self._rates = rates
            self.guard.set_rates(*rates)

    def reloaded(self, outcome: Outcome) -> list[str]:
        """Count a reload of the configuration; unless it was refused, read all files again.

        Returns one line about the result of each.
        """
        self.reloads[outcome] += 1
        return [] if outcome == "refused" else [files.read() for files in self.watched]

    def _watch_tokens(self, path: Path) -> None:
        def reload() -> None:
            self.guard.replace(read_tokens(_text(path)))

        files = WatchedFiles("tokens", [path], reload)
        reload()
        self.watched.append(files)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(KEY, f"{path}: {error.strerror}", "a readable file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(KEY, f"{path}: not UTF-8", "a TOML file of [[tokens]]") from error


EDGE_METRICS: Rows = {
    "tokens": gauge("Valid bearer tokens; 0: no token is required", "guard.token_count"),
    "security_reload_failures": counter(
        "Failed reloads of changed files; the previous contents stay in effect",
        lambda edge: {files.what: files.failures for files in edge.watched},
        "files",
    ),
    "config_reloads": counter(
        "Reloads of the configuration (SIGHUP); a refused one changes no setting",
        "reloads",
        "outcome",
    ),
}
