"""How long each stage of a decision takes."""

from router.protocol.requests import SelectRequest
from router.sequence.active.prompt import prepare
from router.sequence.active.stages import BLOCK_HASHING, FIND, SCHEDULING, SEQUENCE_HASHING, Stages
from support.values.builders import IDENTITY


class Clock:
    """Goes on by a second with every look at it."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        self.now_s += 1.0
        return self.now_s


def test_elapsed_time_goes_to_the_ending_stage():
    stages = Stages(Clock())
    for stage in (SCHEDULING, FIND, SCHEDULING):
        stages.end(stage)
    assert stages.seconds[FIND] == 1.0
    assert stages.seconds[SCHEDULING] == 2.0
    assert stages.total_s == 3.0


def test_waiting_time_is_no_stage():
    stages = Stages(Clock())
    stages.resume()
    stages.end(FIND)
    assert sum(stages.seconds) == 1.0
    assert stages.total_s == 2.0


def test_hashing_is_timed_in_its_two_steps():
    stages = Stages(Clock())
    prepare(SelectRequest(token_ids=list(range(40))), [IDENTITY], stages)
    assert (stages.seconds[BLOCK_HASHING], stages.seconds[SEQUENCE_HASHING]) == (1.0, 1.0)


def test_prompt_with_hashes_is_not_hashed():
    stages = Stages(Clock())
    prepare(SelectRequest(sequence_hashes=[1, 2], isl_tokens=8), [IDENTITY], stages)
    assert sum(stages.seconds) == 0.0
