"""The lines about attached engines on a terminal: the sentence, and the trust in its ranks."""

import time

import pytest

from router.discovery.attach.announcer import Announcer
from router.observability.event_timeline import EventTimeline
from router.protocol.values import Doubt
from support.values.builders import World, rank


def shown_line(doubts, sentence, age_s=0.0):
    """What a terminal shows of an engine with one block and these doubts, confirmed `age_s` ago."""
    world, shown = World(), []
    world.worker(1)
    world.journals[rank(1)].set_doubts(doubts)
    world.cache(rank(1), [1, 2, 3, 4])
    world.report_load(rank(1), time.monotonic() - age_s)
    Announcer(world.core, EventTimeline(time.time), shown.append).say(1, sentence, is_good=True)
    return shown


@pytest.mark.parametrize(
    ("doubts", "sentence", "state"),
    [
        (0, "proved", "exact (0: 1 blocks)"),
        (
            Doubt.UNKNOWN_FIELDS,
            "proved",
            "degraded (0: 1 blocks): unknown fields in engine events",
        ),
        (Doubt.EVENTS_LOST, "no replay: trust is 'degraded'", "degraded (0: 1 blocks)"),
    ],
)
def test_state_of_degraded_ranks_has_a_reason_once(doubts, sentence, state):
    assert shown_line(doubts, sentence) == [f"{sentence}: {state}"]


def test_state_of_a_rank_that_was_confirmed_too_long_ago_says_so():
    (line,) = shown_line(0, "proved", age_s=1.2)
    assert line.startswith("proved: lagging (0: 1 blocks): last confirmed 1.")
    assert line.endswith(" s ago")
