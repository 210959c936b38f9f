"""What a feed knows, in a file."""

import pytest

from router.publisher.batch_order.position import SavedPosition
from router.publisher.errors import FeedStateError
from router.publisher.follower.state import FeedState, load_feed_state, save_feed_state

STATE = FeedState(SavedPosition(7, bytes(16)), b"normalizer")
PARTS = STATE.position, [b"norm", memoryview(b"alizer")]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state"


def test_saved_state_is_read(path):
    assert load_feed_state(path) is None
    save_feed_state(path, SavedPosition(1, b""), [])
    save_feed_state(path, *PARTS)
    assert load_feed_state(path) == STATE
    assert [file.name for file in path.parent.iterdir()] == ["state"]


def test_damaged_state_is_refused(path):
    save_feed_state(path, *PARTS)
    whole = path.read_bytes()
    others = [b"", b"other", whole[:-1], whole[:30] + b"x" + whole[31:], whole[:4] + b"\xff" * 30]
    for content in others:
        path.write_bytes(content)
        with pytest.raises(FeedStateError):
            load_feed_state(path)


def test_a_half_written_draft_is_no_state(path):
    save_feed_state(path, *PARTS)
    path.with_name("state.new").write_bytes(b"half")
    assert load_feed_state(path) == STATE
    save_feed_state(path, *PARTS)


def test_a_folder_that_is_not_there_is_an_error(path):
    with pytest.raises(FeedStateError):
        save_feed_state(path / "no" / "state", *PARTS)
