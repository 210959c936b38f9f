"""SECURITY.md names every listening socket, every subject in use and every file written."""

import fnmatch
import os
import re
from pathlib import Path

import nats
import pytest

from support.processes.processes import Process
from support.processes.servers import eventually, free_port

SECURITY = (Path(__file__).parents[2] / "SECURITY.md").read_text()
SMALL = {"num-blocks": 64, "max-model-len": 1024}


def rows(heading):
    """Return the cells of the first table below a heading."""
    section = SECURITY.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    table = section.partition("\n|")[2].partition("\n\n")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def named(cells):
    """Return what stands between backquotes."""
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def listening(pid):
    """Return the ports and paths at which a process accepts connections or datagrams."""
    links = [_link(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {link.removeprefix("socket:[").rstrip("]") for link in links if "socket" in link}
    found = set()
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
            cells = line.split()
            if cells[9] in inodes and (cells[3] == "0A" or kind.startswith("udp")):
                found.add(int(cells[1].rpartition(":")[2], 16))
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        cells = line.split()
        if cells[6] in inodes and int(cells[3], 16) & 0x10000:
            found.add(cells[7])
    return found


def _link(path):
    try:
        return os.readlink(path)
    except FileNotFoundError:  # closed meanwhile
        return ""


def test_every_row_of_the_threat_model_names_its_tests():
    for heading in ("Ports", "NATS subjects", "Files"):
        assert rows(heading)
        for cells in rows(heading):
            tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", cells[-1])
            assert tests, f"{heading}: {cells[0]}"
            for path, name in tests:
                text = (Path(__file__).parents[2] / path).read_text()
                assert f"def {name}(" in text, f"{path}::{name}"


class Observed:
    """A fleet with everything on that opens sockets or writes files, and what the bus has seen."""

    def __init__(self, fleet, folder):
        self.fleet = fleet
        self.folder = folder
        self.sockets = {}
        self.processes = {}
        self.subjects = set()

    async def start(self, nats_url, client):
        key, port = self.folder / "given" / "block.key", free_port()
        key.parent.mkdir()
        key.write_text("5e" * 32)
        for name in ("disk", "share", "log"):
            (self.folder / name).mkdir(mode=0o700)
        common = {"nats-url": nats_url, "drain-s": 0}
        keyed = {**common, "block-key-file": key}
        self.fleet.router_options |= {
            "block-key-file": key,
            "data-dir": self.folder / "router",
            "decision-log": self.folder / "log" / "decisions",
        }
        await self._workers(key)
        self._note_process("router", self.fleet.router, {self.fleet.router_port})
        self._start("indexer", port, {**keyed, "data-dir": self.folder / "indexer"})
        port = free_port()
        self._start("forward", port, {"router-url": self.fleet.url, "drain-s": 0})
        # Before, an agent that starts would take this subscriber for another agent of its id.
        await client.subscribe(">", cb=self._note)

    async def _workers(self, key):
        """Start one with tiers, and one that shares over a socket in a folder as well."""
        ports, config, fleet = [free_port(), free_port()], key.parent, self.fleet
        texts = [f'share = true\nblock_key_file = "{key}"\nshare_port = {port}\n' for port in ports]
        texts[0] += f'host_cache_blocks = 96\ndisk_cache_dir = "{self.folder}/disk"\n'
        texts[0] += "disk_cache_blocks = 128\n"
        texts[1] += f'share_dir = "{self.folder}/share"\n'
        for name, text in zip(("tiers", "folder"), texts, strict=True):
            (config / f"{name}.toml").write_text(text)
        await fleet.start(1, config=config / "tiers.toml", **SMALL)
        fleet.add_worker(2, config=config / "folder.toml", **SMALL)
        await fleet.until_ready(2)
        http = [int(fleet.endpoints[number].rpartition(":")[2]) for number in (1, 2)]
        self._note_process("agent with tiers", fleet.workers[1], {http[0], ports[0]})
        socket = str(self.folder / "share" / "kv-2.0.blocks")
        self._note_process("agent with a folder", fleet.workers[2], {http[1], ports[1], socket})

    def _start(self, command, port, options):
        process = Process(
            self.folder / "log", command, "router", command, **options, **{"http-port": port}
        )
        self._note_process(command, process, {port})

    def _note_process(self, name, process, sockets):
        self.processes[name] = process
        self.sockets[name] = sockets

    def is_listening(self, name):
        return self.sockets[name] <= listening(self.processes[name].popen.pid)

    async def _note(self, message):
        self.subjects.add(message.subject)

    def stop(self):
        for process in self.processes.values():
            process.end()


@pytest.fixture
async def observed(fleet, tmp_path, nats_server):
    client = await nats.connect(nats_server.url)
    fleet.directory = tmp_path / "log"
    seen = Observed(fleet, tmp_path)
    try:
        await seen.start(nats_server.url, client)
        yield seen
    finally:
        seen.stop()
        await client.close()


async def test_sockets_subjects_and_files_are_those_of_the_threat_model(observed):
    for number in range(4):
        await observed.fleet.ask([number, *range(250)])

    async def listen():
        return all(observed.is_listening(name) for name in observed.processes)

    await eventually(listen)
    for name, expected in observed.sockets.items():
        assert listening(observed.processes[name].popen.pid) == expected, name
    assert {"http_port", "share_port", "share_dir"} <= {*named(row[0] for row in rows("Ports"))}
    for process in observed.processes.values():
        assert process.stop() == 0
    patterns = [_pattern(name) for row in rows("NATS subjects") for name in named(row[:1])]
    assert observed.subjects
    of_the_bus = ["$JS.*", "_INBOX.*"]
    assert not {each for each in observed.subjects if not _is_any(each, patterns + of_the_bus)}
    files = {str(path.relative_to(observed.folder)) for path in _files(observed.folder)}
    written = [name for row in rows("Files") for name in named(row[:1])]
    assert not {each for each in files if not _is_any(each, [f"*{name}" for name in written])}


def _files(folder):
    given = {"given", "nats"}
    return [
        p for p in folder.rglob("*") if p.is_file() and p.relative_to(folder).parts[0] not in given
    ]


def _pattern(subject):
    """Return a pattern of a subject with words for its parameters."""
    return re.sub(r"\{\w+\}", "*", subject).replace(">", "*")


def _is_any(name, patterns):
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
