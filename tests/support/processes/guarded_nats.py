"""A nats-server with logins, for tests."""

import os
import subprocess

from support.processes.servers import BIN, free_port, wait_for_port


class GuardedNats:
    """A nats-server with a configuration of its own."""

    def __init__(self, directory, config, scheme="nats", environment=None):
        self.port = free_port()
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        path = directory / "nats.conf"
        store = f'jetstream: {{store_dir: "{directory}/js"}}'
        path.write_text("\n".join([f'listen: "127.0.0.1:{self.port}"', store, config]))
        self.log = directory / "nats.log"
        self.process = subprocess.Popen(
            [str(BIN / "nats-server"), "-c", str(path), "-l", str(self.log)],
            stderr=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )
        wait_for_port(self.port)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def violations(self):
        """What users were refused, as the server's log says it."""
        return [line for line in self.log.read_text().splitlines() if "Violation" in line]
