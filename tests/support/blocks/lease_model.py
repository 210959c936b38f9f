"""What leases of blocks should be, beside a real manager that serves its blocks on a socket."""

import socket
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from router.protocol.values import Tier
from support.blocks.sharing_process import TOKEN, config_of, shared
from support.fleets.peering import content, identities, name
from support.processes.servers import until
from worker_agent.blocks.changes import BlockRemoved, BlockStored
from worker_agent.manager.manager import KvBlockManager
from worker_agent.sharing.peer_messages import Challenge, PeerRefused, Proof, Welcome
from worker_agent.sharing.peer_wire import CLIENT, NONCE_BYTES, Line, proof_of
from worker_agent.transfer.block_window import BlockWindow, Incoming

BLOCKS, PEER_BLOCKS, PUSHED_BLOCKS, KEPT_BLOCKS, LENT_BLOCKS = 16, 4, 8, 4, 10
PUSH_S, LENT_S, TIMEOUT_S = 10.0, 15.0, 60.0
NUMBERS = range(16)
SENDERS = range(3)
LATE = 9


def numbers_of(first, count):
    return [(first + number) % len(NUMBERS) for number in range(count)]


def places_of(mask, count):
    return [place for place in range(count) if mask >> place & 1]


class Sender:
    """A peer that may stop in the middle of a put, and send damaged blocks."""

    def __init__(self, address):
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(address.removeprefix("unix://"))
        self.line = Line(connected, address, time.monotonic() + TIMEOUT_S)
        self.putting = None
        challenge, nonce = self.line.receive(Challenge), bytes(NONCE_BYTES)
        self.line.send(Proof(proof_of(CLIENT, TOKEN, challenge.nonce), nonce))
        self.line.receive(Welcome)
        self.line.authenticate(TOKEN, nonce + challenge.nonce, is_client=True)

    def ask(self, request, kind):
        """The answer, or the rule by which it is refused."""
        self.line.until_s = time.monotonic() + TIMEOUT_S
        self.line.send(request)
        return self.answer(kind)

    def answer(self, kind):
        answer = self.line.receive(kind | PeerRefused)
        return answer.rule if isinstance(answer, PeerRefused) else answer


class Lent:
    """The model of a lease; `sender` and `numbers`: of a push, `numbers` also of named blocks."""

    def __init__(self, listed, until_s, numbers, sender=None):
        self.listed, self.blocks, self.until_s = listed, listed.block_indices, until_s
        self.numbers, self.sender = numbers, sender
        self.is_live, self.written, self.arrived, self.users = True, set(), set(), []

    @property
    def is_push(self):
        return self.sender is not None

    @property
    def is_named(self):
        return bool(self.numbers) and not self.is_push

    @property
    def uses_blocks(self):
        return self.is_live or bool(self.users)

    def only(self, places):
        return replace(self.listed, block_indices=tuple(self.blocks[place] for place in places))


class LeaseModel:
    """A manager, senders, and what the leases of its blocks should be."""

    def __init__(self):
        self.now_s, self.versions = 0.0, 0
        self.folder = TemporaryDirectory()
        self.manager = KvBlockManager(config_of(1337))
        path = Path(self.folder.name) / "socket"
        self.sharing = shared(self.manager, path=path, max_leased_blocks=LENT_BLOCKS,
                              clock=lambda: self.now_s)  # fmt: skip
        self.stack = self.manager.stack
        until(self.is_measured, poll_s=0.0005)  # It uses blocks of the pool.
        self.host = self.manager.host()
        [self.set] = [each for each in self.manager.block_sets().values()
                      if each.blocks is self.host]  # fmt: skip
        self.window = BlockWindow(self.set.memory.physical)
        self.reader = self.sharing.client(1337, self.sharing.addresses, TIMEOUT_S)
        self.reader.find(identities(0))
        self.address = self.sharing.addresses[-1]
        self.senders = [Sender(self.address) for _ in SENDERS]
        self.lent, self.held = [], []
        self.named = {}
        """The block of each number."""
        self.pushed = set()
        """The numbers that were named by a push, with their checksums."""
        self.memory = {}
        """The bytes of each block that has known ones."""
        self.counts = dict.fromkeys(("granted", "refused", "ended", "expired", "abandoned"), 0)
        self.receiving = dict.fromkeys(("refused", "cut", "named_blocks"), 0)

    def is_measured(self):
        self.stack.poll(0.0)
        return self.stack.is_probed

    # ── The model ───────────────────────────────────────────────────────────────────────────────

    @property
    def live(self):
        return [each for each in self.lent if each.is_live]

    @property
    def live_pushes(self):
        return [each for each in self.live if each.is_push]

    @property
    def used(self):
        """The blocks in use."""
        users = [each.blocks for each in self.lent if each.uses_blocks]
        return {block for blocks in (*users, *self.held_blocks) for block in blocks}

    @property
    def held_blocks(self):
        return [each.block_ids for each in self.held]

    def available(self):
        return BLOCKS - len(self.used)

    def allocated(self, count, allocate):
        """Allocate; of the names, those go that have to, and none in use."""
        used, before = self.used, dict(self.named)
        empty = BLOCKS - len(used.union(before.values()))
        outcome = allocate()
        places = self.host.pool.scan(identities(*before))
        self.named = {
            n: block for n, block in zip(before, places, strict=True) if block is not None
        }
        assert len(before) - len(self.named) == max(count - empty, 0)
        for number, block in before.items():
            assert self.named.get(number, block) == block
            assert number in self.named or block not in used
        self.pushed &= self.named.keys()
        return outcome

    def name(self, numbers, blocks):
        """Name blocks; where there is one of that name, it stays. Returns those that were named."""
        new = {n: block for n, block in zip(numbers, blocks, strict=True) if n not in self.named}
        self.named |= new
        return new.keys()

    def new_content(self):
        self.versions += 1
        return content(self.versions)

    def refusal(self, lent, *, is_write):
        """The rule that refuses the use of a lease, or None."""
        if not lent.is_live:
            return "lease_unknown"
        if self.now_s >= lent.until_s:
            return "lease_expired"
        if lent.is_push and not is_write:
            return "not_readable"
        return "immutable" if is_write and lent.is_named else None

    def end(self, lent, how):
        lent.is_live = False
        self.counts[how] += 1

    # ── What a rule is about ────────────────────────────────────────────────────────────────────

    @property
    def putting(self):
        return [each for each in self.senders if each.putting]

    def idle(self, choice):
        idle = [each for each in self.senders if not each.putting]
        return idle[choice % len(idle)]

    def lease(self, choice):
        """A live one, the last first; or the last that has ended."""
        live, ended = self.live, [each for each in self.lent if not each.is_live]
        return (
            ended[-1] if ended and (choice == LATE or not live) else live[-1 - choice % len(live)]
        )

    def rooms(self, count):
        rooms = [bytearray(self.window.block_bytes) for _ in range(count)]
        return rooms, Incoming([memoryview(each) for each in rooms])

    # ── What always holds ───────────────────────────────────────────────────────────────────────

    def blocks_add_up(self):
        self.host.pool.check_invariants()
        used = self.used
        status = self.host.status
        assert status.active_blocks == len(used)
        assert status.inactive_blocks == len(set(self.named.values()) - used)
        found = self.host.pool.scan(identities(*NUMBERS))
        assert found == [self.named.get(number) for number in NUMBERS]

    def leases_are_bounded_and_counted(self):
        pushes = self.live_pushes
        blocks = sum(len(each.blocks) for each in pushes)
        assert self.sharing.pushes == (len(pushes), blocks)
        assert blocks <= PUSHED_BLOCKS
        assert self.sharing.leases == len(self.live)
        assert self.sharing.leased_blocks == sum(len(each.blocks) for each in self.live)
        counters, receiver = self.sharing.lease_counters, self.sharing.receiver.counters
        assert {key: getattr(counters, key) for key in self.counts} == self.counts
        assert {key: getattr(receiver, key) for key in self.receiving} == self.receiving

    def every_byte_is_right(self):
        assert self.memory.keys() >= set(self.named.values())
        for block, expected in self.memory.items():
            assert self.window.outgoing([block])[0] == expected
        store = self.stack.store_of(Tier.HOST)
        for number in self.pushed:
            block = self.named[number]
            proof = xxh3_64_intdigest(self.memory[block])
            assert store.proof(block, *identities(number)) == proof

    def close(self):
        for sender in self.senders:
            sender.line.close()
        self.reader.close()
        until(lambda: not self.sharing.connections)
        self.sharing.close(TIMEOUT_S)
        for handle in self.held:
            handle.release()
        assert self.host.status.active_blocks == self.host.leaked_blocks == 0
        self.stack.call(Tier.HOST, lambda _: None).result(TIMEOUT_S)
        names = set()
        for each in self.stack.poll(0.0):
            match each.change:
                case BlockStored(stored):
                    assert stored not in names
                    names.add(stored)
                case BlockRemoved(removed):
                    names.remove(removed)
        assert names == {name(number) for number in self.named}
        self.manager.close()
        self.folder.cleanup()
