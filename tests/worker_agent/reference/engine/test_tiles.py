"""Every token sits in the row of its position, and after what it depends on."""

from hypothesis import given
from hypothesis import strategies as st

from worker_agent.reference.engine.tiles import TILE, pack

chunks = st.lists(st.tuples(st.integers(0, 100), st.integers(1, 60)), max_size=8).map(
    lambda sizes: [(i, start, start + count) for i, (start, count) in enumerate(sizes)]
)


@given(chunks)
def test_every_position_is_computed_once_in_its_own_row(given_chunks):
    seen = []
    for tile in pack(given_chunks):
        rows = [row for segment in tile.segments for row in segment.rows]
        assert len(set(rows)) == len(rows)
        for segment in tile.segments:
            positions = range(segment.start, segment.stop)
            assert list(segment.rows) == [position % TILE for position in positions]
            seen += [(segment.request, position) for position in positions]
    assert sorted(seen) == [(r, p) for r, start, stop in given_chunks for p in range(start, stop)]


@given(chunks)
def test_later_positions_of_a_request_come_in_later_tiles(given_chunks):
    last = {}
    for number, tile in enumerate(pack(given_chunks)):
        for segment in tile.segments:
            assert last.get(segment.request, (-1, segment.start)) < (number, segment.start + 1)
            assert last.get(segment.request, (-1, 0))[0] < number
            last[segment.request] = (number, segment.stop)


def test_decodes_of_several_requests_share_a_tile():
    assert len(pack([(0, 3, 4), (1, 21, 22), (2, 6, 7)])) == 1
    assert len(pack([(0, 3, 4), (1, 19, 20)])) == 2
