"""What an HTTP server of ours is guarded by: tokens and certificates, and their files."""

import ssl
from pathlib import Path

from router.errors import ConfigError
from router.security.config import SecurityConfig
from router.security.guard import Guard
from router.security.reloads import ReloadedFiles, look_forever
from router.security.tls import ServerTls
from router.security.tokens import KEY, read_tokens


class Edge:
    """`guard` admits requests; `tls`: of the server, None without. Raises ConfigError.

    `watched`: files that count anew when they change.
    """

    def __init__(self, config: SecurityConfig) -> None:
        self.guard = Guard(config.default_requests_per_s)
        self.tls: ssl.SSLContext | None = None
        self.watched: list[ReloadedFiles] = []
        if config.token_file:
            self._watch_tokens(Path(config.token_file))
        if config.tls_cert_file:
            tls = ServerTls(config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file)
            self.tls = tls.context
            self.watched.append(ReloadedFiles("certificates", tls.files, tls.reload))

    async def run(self) -> None:
        """Look after the files until cancelled."""
        await look_forever(self.watched)

    def reload(self) -> list[str]:
        """Read all files again; what came of it, in words."""
        return [files.read() for files in self.watched]

    def _watch_tokens(self, path: Path) -> None:
        def reload() -> None:
            self.guard.replace(read_tokens(_text(path)))

        files = ReloadedFiles("tokens", [path], reload)
        reload()
        self.watched.append(files)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(KEY, f"{path}: {error.strerror}", "a readable file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(KEY, f"{path}: not UTF-8", "a TOML file of [[tokens]]") from error
