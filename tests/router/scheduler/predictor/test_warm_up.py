"""Work for which an engine may have compiled is recognised."""

from router.protocol.loads import LoadCounters
from router.scheduler.predictor.warm_up import WarmUp

PROMPT = LoadCounters(steps=2, prefill_tokens=900)
LONG_PROMPT = LoadCounters(steps=2, prefill_tokens=9_000)
DECODING = LoadCounters(steps=10, decode_requests=30)
BOTH = LoadCounters(steps=10, prefill_tokens=1_500, decode_requests=30)


def test_the_first_work_and_the_first_of_each_shape_are_first():
    warm_up = WarmUp()
    works = [PROMPT, PROMPT, LONG_PROMPT, DECODING, LONG_PROMPT, DECODING, BOTH, PROMPT]
    firsts = [True, False, True, True, False, False, False, False]
    assert [warm_up.is_first(each) for each in works] == firsts


def test_another_life_begins_cold():
    warm_up = WarmUp()
    assert warm_up.is_first(PROMPT)
    warm_up.restart(is_warm=False)
    assert warm_up.is_first(PROMPT)


def test_an_engine_that_had_worked_before_it_was_seen_is_warm():
    warm_up = WarmUp()
    warm_up.restart(is_warm=True)
    assert not warm_up.is_first(PROMPT)


def test_an_engine_without_steps_has_shapes_of_its_tokens():
    warm_up = WarmUp()
    assert [warm_up.is_first(LoadCounters(prefill_tokens=n)) for n in (5, 7, 50)] == [
        True,
        False,
        True,
    ]
