"""A whole deployment with tokens, as users start it: all that listens, and its callers."""

import itertools
import os
from contextlib import ExitStack

from attack.clients import HttpClient, NatsWire
from router.tools.up.fleet import write_tokenizer
from support.processes.processes import Process
from support.processes.servers import NatsServer, free_port, until
from support.values.token_files import token_lines, token_of

VICTIM, ATTACKER, ACCOMPLICE, GATEWAY, OPERATOR, MONITOR, FORWARDER, SLOW = names = (
    "victim", "attacker", "accomplice", "gateway", "operator", "monitor", "forwarder", "slow",
)  # fmt: skip
TOKENS = "".join(
    (
        token_lines(VICTIM, "route", tenant=VICTIM),
        token_lines(ATTACKER, "route", tenant=ATTACKER),
        # Shares the victim's salt, by a mistake of its operator: the leak that must be found.
        token_lines(ACCOMPLICE, "route", tenant=ACCOMPLICE, cache_salts=[VICTIM]),
        token_lines(GATEWAY, "route"),
        token_lines(OPERATOR, "admin metrics"),
        token_lines(MONITOR, "metrics"),
        token_lines(FORWARDER, "route loads"),
        token_lines(SLOW, "route", requests_per_s=0.001, burst_requests=2),
    )
)
KEY = "5e" * 32
SECRETS = [KEY, *map(token_of, names)]

MODEL = {
    "num-layers": 2, "hidden-size": 32, "num-heads": 4, "num-kv-heads": 2, "max-model-len": 1024,
}  # fmt: skip

LIMITS = {
    "header-timeout-s": 2.0, "body-timeout-s": 2.0, "max-connections": 64,
    "body-limit-bytes": 1 << 20,
}  # fmt: skip
"""Small, so that an attack is short."""


class GuardedFleet:
    """nats-server, a router, an indexer, two workers with tiers and block servers, two forwarders.

    One forwarder has engines tokenize, the other tokenizes itself. `ports` of what speaks HTTP.
    """

    def __init__(self, directory):
        self.directory = directory
        self.nats = NatsServer(directory / "nats")
        self.ports = {}
        self.processes = {}
        self.share_ports = {}
        self._request_ids = itertools.count()
        self._stack = ExitStack()
        self._files = {"token-file": TOKENS, "block-key-file": KEY}
        self._files |= {f"of-{name}": token_of(name) for name in (FORWARDER, GATEWAY)}

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _start(self):
        (self.directory / "nats").mkdir()
        self.nats.start()
        self._stack.callback(self.nats.kill)
        for name, text in self._files.items():
            (self.directory / name).write_text(text)
        bus = {"nats-url": self.nats.url, **self._file("block-key-file")}
        self._process(
            "router", "router", "serve", **bus, **LIMITS,
            **{"name": "router", "predicted-ttl-s": 2.0, "session-affinity-ttl-s": 60.0},
        )  # fmt: skip
        self._process("indexer", "router", "indexer", **bus, **LIMITS)
        for number, name in enumerate(("worker", "worker-2"), start=1):
            self._worker(name, number, bus)
        self._forwarder("forwarder")
        write_tokenizer(self.directory / "tokenizer")
        self._forwarder("tokenizing", tokenizer=self.directory / "tokenizer")
        for name in self.processes:
            until(lambda name=name: self.is_ready(name))
        until(self.schedules)

    def _worker(self, name, worker_id, bus):
        folder = self.directory / f"disk-{worker_id}"
        folder.mkdir()
        limits = {k: v for k, v in LIMITS.items() if not k.startswith(("body", "max"))}
        tiers = {"host-cache-blocks": 64, "disk-cache-blocks": 64, "disk-cache-dir": folder}
        self.share_ports[name] = free_port()
        self._process(
            name, "worker_agent", "run", **bus, **limits, **tiers, **MODEL,
            **{"config": self._sharing(), "share-port": self.share_ports[name],
               "worker-id": worker_id, "name": name},
        )  # fmt: skip

    def _forwarder(self, name, **options):
        self._process(
            name, "router", "forward", **LIMITS, **options,
            **{"router-url": f"http://127.0.0.1:{self.ports['router']}",
               "router-token-file": self.directory / f"of-{FORWARDER}",
               "engine-token-file": self.directory / f"of-{GATEWAY}",
               "bodies-limit-bytes": 4 << 20},
        )  # fmt: skip

    def _sharing(self):
        path = self.directory / "agent.toml"
        path.write_text("share = true\nonboard_always = true\n")
        return path

    def _file(self, name):
        return {name: self.directory / name}

    def _process(self, name, module, command, /, **options):
        self.ports[name] = port = free_port()
        options = {"http-port": port, "drain-s": 0, **self._file("token-file"), **options}
        self.processes[name] = process = Process(self.directory, name, module, command, **options)
        self._stack.callback(process.end)

    # ── Callers ──────────────────────────────────────────────────────────────────────────────────

    def client(self, process, name=None):
        """A caller of a process with the token of this name; without one, a stranger."""
        return HttpClient(self.ports[process], None if name is None else token_of(name))

    def wire(self):
        """A connection to the bus."""
        return NatsWire(self.nats.port)

    def new_id(self):
        return f"id-{next(self._request_ids):09}"

    def is_ready(self, name):
        """Whether a process says so, however long it takes."""
        process = self.processes[name]
        assert process.popen.poll() is None, process.log.read_text()
        try:
            with self.client(name) as client:
                return client.ask("GET", "/ready").status == 200
        except OSError:
            return False

    def schedules(self):
        """Whether requests are served, and the index known, from end to end."""
        with self.client("forwarder", GATEWAY) as client:
            body = {"model": "default", "prompt": "hello", "max_tokens": 1}
            if client.ask("POST", "/v1/completions", body).status != 200:
                return False
        with self.client("router", GATEWAY) as router, self.client("indexer", GATEWAY) as indexer:
            prompt = {"token_ids": [1, 2, 3]}
            is_placed = router.ask("POST", "/select", prompt).status == 200
            return is_placed and indexer.ask("POST", "/query", prompt).status == 200

    # ── What an attack may have left ─────────────────────────────────────────────────────────────

    def reservations(self):
        """How many requests are booked."""
        with self.client("router", OPERATOR) as client:
            loads = client.ask("GET", "/loads").json()
        return sum(rank["active_requests"] for scope in loads for rank in scope["loads"])

    def descriptors(self, name):
        """How many files and sockets a process has open."""
        return len(os.listdir(f"/proc/{self.processes[name].popen.pid}/fd"))

    def resident_bytes(self, name):
        """How much memory a process has."""
        with open(f"/proc/{self.processes[name].popen.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def metrics(self, name):
        """The metrics of a process, as text."""
        with self.client(name, MONITOR) as client:
            return client.ask("GET", "/metrics").body.decode()

    def spoken(self):
        """All that processes log, and all that they show to monitoring."""
        logs = [process.log.read_text() for process in self.processes.values()]
        return "\n".join([*logs, *map(self.metrics, self.processes)])
