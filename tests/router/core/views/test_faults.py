"""What is known to be wrong, in sentences."""

from router.core.commands import SetCaution, SetProblem, SetSourceFault
from router.core.views.faults import MOST_SENTENCES, faults
from router.indexer.rank_index import SourceFault
from support.values.builders import World, rank


def test_problems_come_before_faults_and_hide_those_of_their_ranks():
    world = World()
    for worker_id in (1, 2, 3):
        world.worker(worker_id)
    world.core.handle(SetProblem(2, "unreachable", is_unreachable=True), 0.0)
    for worker_id in (1, 2):
        fault = SourceFault(f"fault of {worker_id}", "degrade")
        world.core.handle(SetSourceFault(rank(worker_id), fault), 0.0)
    assert faults(world.core) == ["worker 2: unreachable", "worker 1 rank 0: fault of 1"]


def test_caution_is_a_fault_of_a_chosen_worker():
    world = World()
    world.worker(1)
    world.core.handle(SetCaution(1, "an untested version"), 0.0)
    assert faults(world.core) == ["worker 1: an untested version"]
    world.core.handle(SetCaution(1, None), 0.0)
    assert faults(world.core) == []


def test_explanation_of_what_is_well_again_is_no_fault():
    world = World()
    world.worker(1)
    world.core.handle(SetSourceFault(rank(1), SourceFault("a batch was refused once")), 0.0)
    assert faults(world.core) == []


def test_sentences_are_bounded_and_the_rest_is_counted():
    world = World()
    for worker_id in range(1, MOST_SENTENCES + 4):
        world.worker(worker_id)
        world.core.handle(SetProblem(worker_id, "gone"), 0.0)
    assert faults(world.core)[-2:] == [f"worker {MOST_SENTENCES}: gone", "and 3 more"]
