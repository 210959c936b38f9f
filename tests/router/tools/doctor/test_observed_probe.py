"""Which events belong to a request of the probe."""

import numpy as np

from router.publisher.engine_events.batch import EngineStored
from router.tools.doctor.observed_probe import announced

PROMPT = list(range(100, 113))


def event(tokens, parent=None, size=4):
    hashes = np.arange(len(tokens) // size, dtype=np.uint64)
    return EngineStored(hashes, parent, np.array(tokens, np.uint32), size)


def test_prompt_announced_in_parts_is_whole():
    seen = announced("plain", PROMPT, [event(PROMPT[:8]), event(PROMPT[8:12], 1)])
    assert (seen.blocks, seen.announced_blocks, seen.other_blocks) == (3, 3, 0)


def test_blocks_cached_before_the_probe_do_not_count():
    seen = announced("chat", PROMPT, [event(PROMPT[4:12], 7)])
    assert (seen.blocks, seen.announced_blocks) == (2, 2)


def test_missing_last_blocks_are_reported():
    seen = announced("plain", PROMPT, [event(PROMPT[:8])])
    assert (seen.blocks, seen.announced_blocks) == (3, 2)


def test_generated_tokens_may_follow_in_the_same_event():
    seen = announced("plain", PROMPT, [event([*PROMPT, 7, 8, 9])])
    assert (seen.blocks, seen.announced_blocks) == (3, 3)


def test_other_requests_do_not_count():
    seen = announced("plain", PROMPT, [event([1, 2, 3, 4]), event([*PROMPT[:4], 1, 2, 3, 4])])
    assert (seen.announced_blocks, seen.other_blocks) == (0, 3)


def test_no_events_is_nothing_announced():
    seen = announced("plain", PROMPT, [])
    assert (seen.blocks, seen.announced_blocks) == (0, 0)
