"""Whether callers can be relied upon to say when a prompt is computed."""

from router.sequence.active.tracker import InferredPrefillEnd


def after(*reported):
    silence = InferredPrefillEnd()
    for is_told in reported:
        silence.note(is_reported=is_told)
    return silence.is_usual


def test_no_request_is_suspected_without_silence():
    assert not after()


def test_tenth_of_a_hundred_silent_requests_is_usual():
    """1 − 0.99 ** 10 = 0.096, 1 − 0.99 ** 11 = 0.105."""
    assert not after(*[False] * 10)
    assert after(*[False] * 11)


def test_silence_is_forgotten_as_others_report():
    """0.105 · 0.99 ** 4 = 0.101, · 0.99 ** 5 = 0.0995."""
    assert after(*[False] * 11, *[True] * 4)
    assert not after(*[False] * 11, *[True] * 5)


def test_one_in_twenty_may_end_before_its_prompt_is_computed():
    assert not after(*([True] * 19 + [False]) * 20)
