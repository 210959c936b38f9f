"""Differences between ranks, apart from the noise of their reports."""

import math
from random import Random

import numpy as np
import pytest

from router.scheduler.predictor.rates import NOMINAL_S
from router.scheduler.predictor.shared_model import FIRST_SPREAD, Deviation, SharedModel

WORK = NOMINAL_S * np.array([10.0, 4_000.0, 2e7, 100.0, 1e6])
TIME_S = float(WORK.sum())


def compared(ranks, reports, times_of):
    """A model that is known, and its ranks after so many reports of each."""
    model, deviations = SharedModel(0.0), [Deviation() for _ in range(ranks)]
    for second in range(20):
        model.learn(WORK, TIME_S, float(second))
    for _ in range(reports):
        for i, each in enumerate(deviations):
            model.note_deviation(each, WORK, TIME_S * times_of(i), 0.0)
    return model, deviations


@pytest.mark.parametrize("seed", range(5))
def test_equal_ranks_with_noise_are_taken_for_alike(seed):
    random = Random(seed)
    model, _ = compared(16, 20, lambda _: math.exp(random.gauss(0, 0.5)))
    assert model.error < FIRST_SPREAD


def test_unequal_ranks_are_expected_to_differ():
    model, _ = compared(8, 30, lambda i: 2.0 if i % 2 else 1.0)
    assert model.error > 0.25


def test_one_slow_rank_is_evident_amid_noise():
    random = Random(1)
    _, ranks = compared(8, 20, lambda i: math.exp(random.gauss(0, 0.3)) * (3.0 if i == 5 else 1.0))
    assert ranks[5].evident > 0.7
    assert sum(each.evident > 0 for each in ranks) <= 2


def test_slow_reports_are_noise_where_many_are_slow():
    model = SharedModel(0.0)
    for _ in range(40):
        model.note_surprise(2.0, 0.01)
        model.note_surprise(-0.05, 0.01)
    assert model.note_surprise(2.0, 0.01) > 1.0 > 0.2 > model.note_surprise(-0.05, 0.01)
