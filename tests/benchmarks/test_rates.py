"""What a router learns of engines without an agent: a captured one, and simulated ones."""

import json

import pytest
from rates import CAPTURED, SHAPES, captured, learned, replayed

from router.sequence.rank_table import RATE_ERROR


def test_half_a_minute_of_a_real_engine_teaches_what_a_prompt_token_takes():
    """From polls alone, and with first tokens. The truth: the same engine, one prompt at a time."""
    rows = captured()
    assert [row.name for row in rows if not row.holds] == []
    assert len(rows) == 2


def test_what_was_not_learned_of_it_is_shown_as_unknown():
    data = json.loads(CAPTURED.read_text())
    nothing = replayed(data, with_first_tokens=False, with_polls=False)[RATE_ERROR]
    tokens = replayed(data, with_first_tokens=True, with_polls=False)[RATE_ERROR]
    both = replayed(data, with_first_tokens=True)[RATE_ERROR]
    assert nothing > 5
    assert nothing > tokens > both
    assert both < 0.5


@pytest.mark.parametrize("shape", SHAPES[1:4:2], ids=lambda shape: shape.name)
@pytest.mark.parametrize("with_first_tokens", [True, False])
def test_busy_engine_is_known_after_five_minutes(shape, with_first_tokens):
    found = learned(shape, 1, with_first_tokens=with_first_tokens)
    assert found.errors[300] < (0.1 if with_first_tokens else 0.2)
    assert found.shown[300] < 0.25
    assert found.busy > 0.9
