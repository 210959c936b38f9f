import pytest

from router.dashboard.board.hit_window import WINDOW_S, HitWindow
from router.protocol.loads import LoadCounters


def test_hit_rates_cover_tokens_since_the_start():
    window = HitWindow(0.0)
    assert (window.predicted, window.actual) == (None, None)
    window.note(100, 80, LoadCounters(prefill_tokens=1_000, cached_tokens=9_000), 0.0)
    assert (window.predicted, window.actual) == (0.8, None)
    window.note(0, 0, LoadCounters(prefill_tokens=1_025, cached_tokens=9_075), 0.0)
    assert (window.predicted, window.actual) == (0.8, 0.75)


def test_older_hits_count_less():
    window = HitWindow(0.0)
    window.note(1_000, 1_000, None, 0.0)
    window.note(1_000, 0, None, WINDOW_S)
    assert window.predicted == pytest.approx(0.269, abs=0.001)
    window.note(0, 0, None, 100 * WINDOW_S)
    assert window.predicted is None


def test_another_life_of_an_engine_counts_from_nothing():
    window = HitWindow(0.0)
    window.note(0, 0, LoadCounters(prefill_tokens=1_000, cached_tokens=0), 0.0)
    window.note(0, 0, LoadCounters(prefill_tokens=10, cached_tokens=30), 0.0)
    assert window.actual == 0.75
