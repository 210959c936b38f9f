"""What an engine's start time and counters say of its process."""

import pytest

from router.discovery.attach.engine_server import ObservedServer
from router.discovery.attach.life import EngineLife, Return


def seen(started_s=None, tokens=None):
    return ObservedServer("http://a", started_s=started_s, served_tokens=tokens)


def life_of(*looks):
    """The life after looks a second apart, None for no answer; and what the last one returned."""
    life, returned = EngineLife(), None
    for now_s, look in enumerate(looks):
        returned = life.note_absent(now_s) if look is None else life.note(look, now_s)
    return life, returned


@pytest.mark.parametrize(
    ("before", "after", "is_new"),
    [
        (seen(100.0), seen(107.0), True),
        (seen(100.0), seen(100.0), False),
        (seen(None, 50), seen(None, 0), True),
        (seen(None, 50), seen(None, 50), False),
        (seen(), seen(), True),
    ],
)
def test_engine_that_returns_is_new_if_its_process_is(before, after, is_new):
    life, returned = life_of(before, None, None, after)
    assert returned == Return(2.0, is_new)
    assert not life.is_several


def test_first_answer_is_no_return():
    assert life_of(None, seen(100.0))[1] is None


def test_process_that_changed_between_two_looks_is_new():
    assert life_of(seen(100.0), seen(107.0))[1] == Return(0.0, is_new=True)


@pytest.mark.parametrize(
    ("looks", "is_several"),
    [
        ((seen(100.0), seen(90.0)), True),
        ((seen(100.0), seen(107.0)), False),
        ((seen(100.0), seen(107.0), seen(100.0)), True),
        ((seen(None, 50), seen(None, 3)), False),
        ((seen(None, 50), seen(None, 3), seen(None, 51), seen(None, 4)), True),
        ((seen(None, 50), None, seen(None, 3), None, seen(None, 0)), False),
    ],
)
def test_process_that_jumps_back_is_several_engines(looks, is_several):
    assert life_of(*looks)[0].is_several == is_several
