"""Nothing lost, no ghosts, no wrong answer called exact: whatever happens to the bus."""

import os

import pytest

from simulation import run
from simulation.mutations import MUTATIONS, first_failure
from simulation.scenario import EVENTS, RATES, draw
from simulation.world import Shared

RUNS = int(os.environ.get("KV_SIMULATION_RUNS", "120"))
FIRST_SEED = int(os.environ.get("KV_SIMULATION_FIRST_SEED", "160"))
SAMPLE = (
    "a new stream is not noticed, unchecked",
    "any report is fresh",
    "no checkpoint is asked for",
    "removals are not published, unchecked",
)


pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def totals():
    totals = run.Totals()
    for result in run.run_seeds(range(FIRST_SEED, FIRST_SEED + RUNS)):
        totals.add(result)
    return totals


def test_every_run_ends_right_and_never_called_a_wrong_answer_exact(totals):
    failures = [line for result in totals.failed for line in run.failure_lines(result)]
    assert not failures, "\n" + "\n".join(failures)


def test_every_fault_really_happened_and_most_answers_were_exact_all_the_same(totals):
    assert {fault for fault in (*RATES, *EVENTS) if not totals.counts[fault]} == set()
    assert totals.counts["exact_answers"] > 0.4 * totals.counts["answers"]


def test_the_same_seed_gives_the_same_run():
    shared = Shared()

    def played(seed):
        lines = []
        result = run.play(draw(seed), shared, lines.append)
        return lines, result

    assert played(3) == played(3)
    assert played(3) != played(4)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_safeguard_taken_away_is_found(name):
    assert name in MUTATIONS
    result, _ = first_failure(name, range(200))
    assert result is not None
