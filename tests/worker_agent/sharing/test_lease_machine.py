"""Leases, pushes and what their owner does meanwhile, in any order, beside an exact model.

A real manager serves its blocks on a socket. After every step each byte of a block whose content is
known is compared, and each number of blocks, leases and pushes.
"""

import time
from itertools import takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from support.blocks.lease_model import (
    BLOCKS,
    KEPT_BLOCKS,
    LATE,
    LENT_BLOCKS,
    LENT_S,
    NUMBERS,
    PEER_BLOCKS,
    PUSH_S,
    PUSHED_BLOCKS,
    SENDERS,
    TIMEOUT_S,
    LeaseModel,
    Lent,
    Sender,
    numbers_of,
    places_of,
)
from support.blocks.sharing_process import MODEL
from support.chaos.fuzzing import examples
from support.fleets.peering import identities, name
from support.processes.servers import until
from worker_agent.sharing.errors import BlocksetError
from worker_agent.sharing.peer_messages import (
    Complete,
    End,
    Go,
    Named,
    Put,
    Released,
    Reserve,
    Reserved,
    Written,
)
from worker_agent.transfer.plan import BlockResult

SENDER, LEASE = st.sampled_from(SENDERS), st.sampled_from([0, 0, 0, 1, 1, 2, 3, LATE])
WAIT_S = st.sampled_from([0.0, 0.0, 4.0, 9.0, 16.0])
MASK, DAMAGED = st.sampled_from([15, 15, 15, 1, 2, 4, 6, 8, 3]), st.sampled_from([0, 0, 0, 1, 2, 5])
"""Of places of a put, and among these."""
MEANWHILE = st.sampled_from(["put", "take_back", "give_up", "give_up", "complete", "wait", "wait"])


class LeaseMachine(LeaseModel, RuleBasedStateMachine):
    def __init__(self):
        RuleBasedStateMachine.__init__(self)
        LeaseModel.__init__(self)

    # ── Requests of peers ───────────────────────────────────────────────────────────────────────

    @rule(sender=SENDER, first=st.sampled_from(NUMBERS), count=st.integers(1, 6))
    def reserve(self, sender, first, count):
        self.reserved(sender, first, count)

    def reserved(self, sender, first, count):
        sender, numbers = self.idle(sender), numbers_of(first, count)
        new = [number for number in numbers if number not in self.named]
        of_sender = sum(len(e.blocks) for e in self.live_pushes if e.sender is sender)
        pushed = sum(len(each.blocks) for each in self.live_pushes)
        room = min(PEER_BLOCKS - of_sender, PUSHED_BLOCKS - pushed)
        fitting = new[: max(min(room, self.available() - KEPT_BLOCKS), 0)]
        request = Reserve([name(number) for number in numbers], MODEL.fingerprint)
        answer = self.allocated(len(fitting), lambda: sender.ask(request, Reserved))
        if not new:
            assert answer == Reserved([], None, True)
        elif not fitting:
            assert answer == ("too_many" if room <= 0 else "no_room")
            self.receiving["refused"] += 1
        else:
            assert [numbers[place] for place in answer.places] == fitting
            assert answer.is_whole == (len(fitting) == len(new))
            lent = Lent(answer.listed, self.now_s + PUSH_S, fitting, sender)
            assert len(set(lent.blocks)) == len(fitting)
            assert self.used.union(self.named.values()).isdisjoint(lent.blocks)
            self.lent.append(lent)
            self.receiving["cut"] += len(fitting) < len(new)
            self.counts["granted"] += 1
            return lent
        return None

    @rule(sender=SENDER, first=st.sampled_from(NUMBERS), count=st.integers(1, 4),
          is_computed=st.booleans(),
          puts=st.lists(st.tuples(MASK, DAMAGED, WAIT_S), min_size=1, max_size=3))  # fmt: skip
    def push(self, sender, first, count, is_computed, puts):
        """All that belongs to a push; the owner may compute the first block meanwhile."""
        lent = self.reserved(sender, first, count)
        if lent is not None:
            for mask, damaged, wait_s in puts:
                self.put(sender, 0, mask, damaged, is_left_open=False)
                self.now_s += wait_s
            if is_computed:
                self.compute(lent.numbers[0], 1, is_held=False)
            self.complete(sender, 0)

    @precondition(lambda self: self.live)
    @rule(lease=LEASE, mask=MASK, damaged=DAMAGED,
          meanwhile=MEANWHILE)  # fmt: skip
    def put_meanwhile(self, lease, mask, damaged, meanwhile):
        """Something else happens to a lease in the middle of a put."""
        lent, _ = self.lease(lease), self.put(0, lease, mask, damaged, is_left_open=True)
        if not lent.users:
            return
        match meanwhile:
            case "put":
                self.put(1, lease, mask, 0, is_left_open=False)
            case "take_back":
                self.take_back(lease)
            case "give_up":
                self.give_up(1, lease)
            case "complete":
                self.complete(1, lease)
            case "wait":
                self.wait(16.0, is_swept=True)
        self.go_on_with_a_put(0, damaged)

    @precondition(lambda self: self.lent)
    @rule(sender=SENDER, lease=LEASE, mask=MASK, damaged=DAMAGED, is_left_open=st.booleans())
    def put(self, sender, lease, mask, damaged, is_left_open):
        sender, lent = self.idle(sender), self.lease(lease)
        places = places_of(mask, len(lent.blocks)) or [0]
        refused = self.refusal(lent, is_write=True)
        if refused is None and lent.is_push:
            if any(not set(places).isdisjoint(other) for other in lent.users):
                refused = "being_written"
            else:
                lent.written.difference_update(places)
        answer = sender.ask(Put(lent.only(places)), Go)
        if refused is not None:
            assert answer == refused
            return
        assert answer == Go(self.window.block_bytes)
        lent.users.append(places)
        sender.putting = lent, places
        if not is_left_open or len(self.putting) == len(SENDERS):
            self.send(sender, damaged)

    @precondition(lambda self: self.putting)
    @rule(sender=SENDER, damaged=DAMAGED)
    def go_on_with_a_put(self, sender, damaged):
        self.send(self.putting[sender % len(self.putting)], damaged)

    def send(self, sender, damaged):
        """Send the blocks of a put; those of the mask `damaged` arrive damaged."""
        (lent, places), sender.putting = sender.putting, None
        wrong = places_of(damaged, len(places))
        blocks = [self.new_content() for _ in places]
        proofs = [xxh3_64_intdigest(each) + (n in wrong) for n, each in enumerate(blocks)]
        sender.line.until_s = time.monotonic() + TIMEOUT_S
        sender.line.send_blocks([memoryview(each) for each in blocks], proofs)
        assert sender.answer(Written) == (Written(wrong) if lent.is_live else "lease_unknown")
        lent.users.remove(places)
        self.memory |= {
            lent.blocks[place]: each for place, each in zip(places, blocks, strict=True)
        }
        if lent.is_live and lent.is_push:
            right = {place for n, place in enumerate(places) if n not in wrong}
            if right - lent.arrived:
                lent.until_s = max(lent.until_s, self.now_s + PUSH_S)
            lent.arrived |= right
            lent.written |= right

    @precondition(lambda self: self.live)
    @rule(sender=SENDER, lease=LEASE, why=st.sampled_from([
        "not_leased", "other_epoch", "duplicate_destination_blocks", "other_model", "invalid_names",
    ]))  # fmt: skip
    def forge(self, sender, lease, why):
        sender, lent = self.idle(sender), self.lease(lease)
        if why in {"other_model", "invalid_names"}:
            is_other = why == "other_model"
            request = Reserve([name(1)] * (2 - is_other), MODEL.fingerprint + is_other)
            assert sender.ask(request, Reserved) == why
            self.receiving["refused"] += 1
            return
        first, *_ = lent.blocks
        other = next(block for block in range(BLOCKS) if block not in lent.blocks)
        forged = {
            "not_leased": {"block_indices": (first, other)},
            "other_epoch": {"epoch": 2},
            "duplicate_destination_blocks": {"block_indices": (first, first)},
        }[why]
        refused = self.refusal(lent, is_write=True) if why != "other_epoch" else None
        assert sender.ask(Put(replace(lent.listed, **forged)), Go) == (refused or why)

    @precondition(lambda self: self.lent)
    @rule(sender=SENDER, lease=LEASE)
    def complete(self, sender, lease):
        lent = self.lease(lease)
        answer = self.idle(sender).ask(Complete(lent.listed.lease), Named)
        refused = self.refusal(lent, is_write=True)
        if lent.is_live and not lent.is_push:
            refused = "not_a_push"
        if refused is None and lent.users:
            refused = "lease_in_use"
        if refused is not None:
            assert answer == refused
            return
        leading = list(takewhile(lent.written.__contains__, range(len(lent.blocks))))
        assert answer == Named(len(leading))
        self.end(lent, "ended")
        self.receiving["named_blocks"] += len(leading)
        count = len(leading)
        self.pushed |= self.name(lent.numbers[:count], lent.blocks[:count])

    @precondition(lambda self: self.live)
    @rule(sender=SENDER, lease=LEASE)
    def give_up(self, sender, lease):
        lent = self.lease(lease)
        assert self.idle(sender).ask(End(lent.listed.lease), Released) == Released()
        if lent.is_live and lent.numbers:
            self.end(lent, "abandoned" if lent.is_push else "ended")

    @rule(sender=SENDER, sent_blocks=st.integers(0, 3))
    def disconnect(self, sender, sent_blocks):
        """Also in the middle of a put, and of a block."""
        place, sender = sender, self.senders[sender]
        if sender.putting is not None:
            lent, places = sender.putting
            sent = [self.new_content() for _ in places[: min(sent_blocks, len(places) - 1)]]
            sender.line.send_blocks([memoryview(each) for each in (*sent, bytes(100))])
            lent.users.remove(places)
            for each in places:
                self.memory.pop(lent.blocks[each], None)
        sender.line.close()
        until(lambda: self.sharing.connections == len(SENDERS), poll_s=0.001)
        for lent in self.live_pushes:
            if lent.sender is sender:
                self.end(lent, "abandoned")
        self.senders[place] = Sender(self.address)

    # ── Reading ─────────────────────────────────────────────────────────────────────────────────

    @rule(first=st.sampled_from(NUMBERS), count=st.integers(1, 6))
    def read_named(self, first, count):
        numbers = numbers_of(first, count)
        rooms, incoming = self.rooms(count)
        outcomes = self.reader.get_named(identities(*numbers), incoming)
        for number, room, outcome in zip(numbers, rooms, outcomes, strict=True):
            is_named = number in self.named
            assert outcome is (BlockResult.DONE if is_named else BlockResult.MISSING)
            assert not is_named or room == self.memory[self.named[number]]
        places = [place for place, number in enumerate(numbers) if number in self.named]
        assert self.reader.find(identities(*numbers)) == places  # The blocks are unused by now.

    @precondition(lambda self: self.lent)
    @rule(lease=LEASE)
    def read_leased(self, lease):
        lent = self.lease(lease)
        rooms, incoming = self.rooms(len(lent.blocks))
        refused = self.refusal(lent, is_write=False)
        if refused is not None:
            assert rule_of(lambda: self.reader.get(lent.listed, incoming)) == refused
            return
        assert set(self.reader.get(lent.listed, incoming)) == {BlockResult.DONE}
        for block, room in zip(lent.blocks, rooms, strict=True):
            assert room == self.memory.get(block, room)

    # ── The owner ───────────────────────────────────────────────────────────────────────────────

    @rule(first=st.sampled_from(NUMBERS), count=st.integers(1, 4), is_held=st.booleans())
    def compute(self, first, count, is_held):
        """Fill blocks, and name them, or keep them until `release`."""
        numbers = numbers_of(first, min(count, self.available()))
        handle = self.allocated(len(numbers), lambda: self.host.allocate(len(numbers)))
        blocks, room = handle.block_ids, self.window.incoming(handle.block_ids)
        for block, view in zip(blocks, room.views, strict=True):
            view[:] = self.memory[block] = self.new_content()
        room.landed(list(range(len(blocks))))
        if is_held:
            self.held.append(handle)
            return
        self.name(numbers, blocks)
        handle.register([name(number) for number in numbers]).release()

    @precondition(lambda self: self.held)
    @rule(choice=st.integers(0, 9))
    def release(self, choice):
        self.held.pop(choice % len(self.held)).release()

    @rule(first=st.sampled_from(NUMBERS), count=st.integers(1, 4), is_named=st.booleans())
    def lend(self, first, count, is_named):
        if is_named:
            there = sorted(self.named, key=lambda number: (number < first, number))
            numbers = there[:count]
            handle = self.host.match(identities(*numbers))
        else:
            numbers, count = [], min(count, self.available())
            handle = self.allocated(count, lambda: self.host.allocate(count))
        if not len(handle):
            handle.release()
        elif sum(len(each.blocks) for each in self.live) + len(handle) > LENT_BLOCKS:
            assert rule_of(lambda: self.sharing.lease(handle, LENT_S)) == "too_many"
            self.counts["refused"] += 1
            handle.release()
        else:
            listed = self.sharing.lease(handle, LENT_S)
            self.lent.append(Lent(listed, self.now_s + LENT_S, numbers))
            self.counts["granted"] += 1

    @precondition(lambda self: self.lent)
    @rule(lease=LEASE)
    def take_back(self, lease):
        lent = self.lease(lease)
        if not lent.is_live or lent.users:
            refused = "lease_in_use" if lent.is_live else "lease_unknown"
            assert rule_of(lambda: self.sharing.take_back(lent.listed)) == refused
            return
        handle = self.sharing.take_back(lent.listed)
        assert handle.block_ids == lent.blocks
        handle.release()
        self.end(lent, "ended")

    @rule(wait_s=WAIT_S, is_swept=st.booleans())
    def wait(self, wait_s, is_swept):
        self.now_s += wait_s
        if is_swept:
            expired = [each for each in self.live if self.now_s >= each.until_s]
            assert self.sharing.tick() == len(expired)
            for each in expired:
                self.end(each, "expired")

    @invariant()
    def agrees(self):
        self.blocks_add_up()
        self.leases_are_bounded_and_counted()
        self.every_byte_is_right()

    def teardown(self):
        self.close()


def rule_of(call):
    with pytest.raises(BlocksetError) as refused:
        call()
    return refused.value.rule


def test_leases_in_any_order_agree_with_the_model():
    run_state_machine_as_test(
        LeaseMachine, settings=settings(max_examples=examples(16), stateful_step_count=50)
    )


@pytest.mark.long
def test_leases_in_any_order_agree_with_the_model_for_long():
    run_state_machine_as_test(
        LeaseMachine, settings=settings(max_examples=examples(400), stateful_step_count=80)
    )
