from hypothesis import given
from hypothesis import strategies as st

from worker_agent.storage.seals import BlockSeals

BYTES = st.binary(max_size=200)
KEYED, OTHER, OPEN = BlockSeals(b"secret"), BlockSeals(b"other"), BlockSeals()


@given(st.binary(max_size=40), BYTES)
def test_seal_is_right_for_its_block(identity, data):
    for seals in (KEYED, OPEN):
        assert seals.is_right(identity, memoryview(data), seals.seal(identity, memoryview(data)))


@given(st.binary(max_size=40), BYTES, st.binary(max_size=40), BYTES, BYTES)
def test_seal_of_anything_else_is_wrong(identity, data, other_identity, other_data, noise):
    seal, view = KEYED.seal(identity, memoryview(data)), memoryview(data)
    if other_identity != identity:
        assert not KEYED.is_right(other_identity, view, seal)
    if other_data != data:
        assert not KEYED.is_right(identity, memoryview(other_data), seal)
    assert not KEYED.is_right(identity, view, OPEN.seal(identity, view))
    assert not KEYED.is_right(identity, view, OTHER.seal(identity, view))
    assert not KEYED.is_right(identity, view, noise)
    assert not KEYED.is_right(identity, view, seal + b"x")
    assert not KEYED.is_right(identity, view, seal[:-1])


def test_seals_of_one_block_differ():
    """Their nonces are drawn: no two messages are authenticated under one."""
    assert len({KEYED.seal(b"a", memoryview(b"b")) for _ in range(100)}) == 100
