"""Averages over the last minute of load reports."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.loads import LoadCounters
from router.scheduler.predictor.traffic import Excess, PromptContexts, Traffic
from router.sequence.rank_table import TRAFFIC_MEMORY_S as MEMORY_S

COUNTED = LoadCounters(
    requests_received=4,
    requests_finished=2,
    decode_requests=600,
    cached_tokens=1_000,
    prefill_tokens=4_000,
)


def test_contexts_are_those_of_the_prompts_since():
    contexts = PromptContexts()
    contexts.note(0.0, 0.0)
    assert contexts.mean_tokens is None
    contexts.note(1_000.0, 500_000.0)
    assert contexts.mean_tokens == 500.0
    contexts.note(1_000.0, 500_000.0)
    assert contexts.mean_tokens == 500.0
    contexts.note(3_000.0, 8_500_000.0)
    assert contexts.mean_tokens == 4_000.0


def test_no_requests_is_no_traffic():
    traffic = Traffic()
    assert (traffic.requests_per_s, traffic.prefill_share) == (0, 0)
    assert (traffic.output_tokens, traffic.reuse) == (0, 0)


def test_steady_traffic_is_known_at_once():
    traffic = Traffic()
    for _ in range(200):
        traffic.add(COUNTED, prefill_s=0.5, elapsed_s=2.0)
        assert traffic.requests_per_s == pytest.approx(2)
        assert traffic.prefill_share == pytest.approx(0.25)
        assert traffic.output_tokens == pytest.approx(300)
        assert traffic.reuse == pytest.approx(0.25)


def test_the_past_fades():
    traffic = Traffic()
    for _ in range(600):
        traffic.add(COUNTED, 0.5, 1.0)
    for _ in range(int(MEMORY_S)):
        traffic.add(LoadCounters(), 0.0, 1.0)
    assert traffic.requests_per_s == pytest.approx(4 * 0.368, rel=0.02)
    assert traffic.output_tokens == pytest.approx(300)


def test_an_excess_counts_once_it_lasts():
    excess = Excess()
    assert [excess.note(value) for value in (5, 4, 6, 2, 0, 9, 9, 9)] == [0, 0, 4, 2, 0, 0, 0, 9]


def test_lack_counts_once_it_lasts():
    excess = Excess()
    assert [excess.note(value) for value in (-5, -4, -6, -1, 3)] == [0, 0, -4, -1, 0]


@given(st.lists(st.floats(-100, 100), min_size=3))
def test_no_more_is_believed_than_the_last_reports_agree_on(values):
    excess = Excess()
    believed = [excess.note(value) for value in values][-1]
    last = values[-Excess.REPORTS :]
    assert all(value * believed >= 0 and abs(value) >= abs(believed) for value in last)
