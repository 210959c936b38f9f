"""The journal: what is read back was written whole, whenever the process was killed."""

from hypothesis import given
from hypothesis import strategies as st

from worker_agent.blocks.names import BlockName
from worker_agent.storage.journal import Entry, SlotJournal

U64 = 2**64 - 1
hashes = st.integers(0, U64)
identities = st.binary(min_size=16, max_size=16)
names = st.builds(BlockName, identities, hashes) | st.builds(
    BlockName, identities, hashes, identities, hashes
)
steps = st.lists(
    st.tuples(st.sampled_from(["begin", "commit", "commit"]), st.integers(0, 4), names, hashes)
)


def reopened(path, num_slots=5, fingerprint=1):
    journal = SlotJournal(path, num_slots, fingerprint)
    entries = journal.entries(journal.written())
    journal.close()
    return entries


@given(steps=steps)
def test_agrees_with_a_dict(tmp_path_factory, steps):
    path = tmp_path_factory.mktemp("journal") / "slots"
    journal, model = SlotJournal(path, 5, 1), {}
    for step, slot, name, checksum in steps:
        if step == "begin":
            journal.begin(slot)
            model.pop(slot, None)
        else:
            journal.commit(slot, name, checksum)
            model[slot] = Entry(slot, name, checksum)
    expected = [model[slot] for slot in sorted(model)]
    assert journal.entries(journal.written()) == journal.entries(range(5)) == expected
    journal.close()
    assert reopened(path) == expected


def test_journal_of_another_kind_is_reset(tmp_path):
    path = tmp_path / "slots"
    journal = SlotJournal(path, 5, 1)
    journal.commit(3, BlockName(bytes(16), 7), 9)
    journal.close()
    assert len(reopened(path)) == 1
    assert reopened(path, fingerprint=2) == []
    assert reopened(path, fingerprint=1) == []
    assert reopened(path, num_slots=6) == []


@given(place=st.integers(24, 24 + 2 * 72 - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_strikes_out_its_slot_alone(tmp_path_factory, place, bit):
    path = tmp_path_factory.mktemp("journal") / "slots"
    journal = SlotJournal(path, 2, 1)
    for slot in range(2):
        journal.commit(slot, BlockName(bytes(16), slot, bytes(16), 5), slot)
    journal.close()
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)
    assert [entry.slot for entry in reopened(path, 2)] == [1 - (place - 24) // 72]


def test_a_record_in_another_s_place_is_none(tmp_path):
    path = tmp_path / "slots"
    journal = SlotJournal(path, 2, 1)
    journal.commit(0, BlockName(bytes(16), 1), 1)
    journal.close()
    data = path.read_bytes()
    path.write_bytes(data[:24] + bytes(72) + data[24:96])
    assert reopened(path, 2) == []
