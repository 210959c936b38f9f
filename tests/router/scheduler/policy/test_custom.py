"""Policies of others: filter, score, pick; and what happens where they break their contract."""

import re
from pathlib import Path
from random import Random

import numpy as np
import pytest

import router.scheduler
from router.errors import ConfigError
from router.scheduler.errors import NoEndpointsError, PolicyFailedError
from router.scheduler.policy.custom import CustomPolicy, checked_policy
from router.scheduler.selector import Policy
from router.scheduler.settings import PolicySettings
from router.sequence.rank_table import BLOCK_SIZE, REQUESTS
from support.values.terms import candidate, table


class Busiest(Policy):
    """Not more than five requests, and of those the most."""

    name = "busiest"

    def filter(self, table, settings):
        return table.column(REQUESTS) <= 5

    def score(self, table, settings):
        return -table.column(REQUESTS)


class Last(Busiest):
    name = "last"

    def pick(self, costs, table, settings, rng):
        return len(costs) - 1


def choose(policy, *rows):
    return checked_policy("test", policy).choose(table(*rows), PolicySettings(), Random(0))


def test_a_policy_filters_scores_and_picks():
    rows = [candidate(requests=requests) for requests in (4, 9, 5, 1)]
    choice = choose(Busiest(), *rows)
    assert (choice.chosen.rank.worker_id, choice.policy) == (3, "busiest")
    assert [rank.worker_id for rank in choice.table.ranks] == [1, 3, 4]
    assert choice.costs.tolist() == [-4, -5, -1]
    assert choose(Last(), *rows).chosen.rank.worker_id == 4


def test_a_policy_chooses_the_same_without_the_checks():
    rows = table(*[candidate(requests=requests) for requests in (4, 9, 5, 1)])
    plain, checked = (
        each.choose(rows, PolicySettings(), Random(0))
        for each in (Busiest(), CustomPolicy(Busiest()))
    )
    assert (plain.index, plain.table.ranks) == (checked.index, checked.table.ranks)


def test_filter_without_candidates_left_raises_no_endpoints():
    with pytest.raises(NoEndpointsError, match="policy busiest filters out every candidate"):
        choose(Busiest(), candidate(requests=6))


def broken(step, result):
    """A policy that does well until it is asked about blocks that are not of 16 tokens."""

    def step_of(self, *arguments):
        of = next(each for each in arguments if hasattr(each, "ranks"))
        if of.values[0, BLOCK_SIZE] == 16:
            return getattr(Busiest, step)(self, *arguments)
        return result(of)

    return checked_policy("test", type("Broken", (Busiest,), {"name": "broken", step: step_of})())


@pytest.mark.parametrize(
    ("step", "result", "reason"),
    [
        ("filter", lambda _: [True, True], "returned a list, not None or 2 bools in an array"),
        ("filter", lambda _: np.ones(3, bool), "an array of bool, shape (3,), not None or 2"),
        ("filter", lambda _: np.ones(2), "returned an array of float64, shape (2,)"),
        ("score", lambda _: [1.0, 2.0], "returned a list, not 2 contiguous float64 in an array"),
        ("score", lambda _: None, "returned a NoneType"),
        ("score", lambda _: np.ones(1), "shape (1,), not 2 contiguous"),
        ("score", lambda _: np.ones(2, int), "returned an array of int64"),
        ("score", lambda of: of.column(REQUESTS), "not 2 contiguous float64"),
        ("score", lambda _: np.array([1, np.nan]), "costs that are not finite: [1.0, nan]"),
        ("score", lambda _: 1 / 0, "raised ZeroDivisionError: division by zero"),
        ("pick", lambda _: 2, "returned 2, not an int from 0 to 1"),
        ("pick", lambda _: -1, "returned -1, not an int from 0 to 1"),
        ("pick", lambda _: True, "returned True, not an int from 0 to 1"),
        ("pick", lambda _: None, "returned None, not an int from 0 to 1"),
    ],
)
def test_broken_policy_contract_fails_one_decision(step, result, reason):
    policy = broken(step, result)
    with pytest.raises(PolicyFailedError) as failed:
        policy.choose(table(*[candidate(block_size=32)] * 2), PolicySettings(), Random(0))
    assert (failed.value.policy, failed.value.step, failed.value.http_status) == (
        "broken",
        step,
        500,
    )
    assert reason in failed.value.reason
    policy.choose(table(*[candidate()] * 2), PolicySettings(), Random(0))


class Nameless(Policy):
    pass


def policy_of(**members):
    return type("Made", (Busiest,), {"name": "made", **members})()


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (object(), "makes a object (allowed: an instance of a subclass of Policy)"),
        (Busiest, "makes a type (allowed: an instance of a subclass of Policy)"),
        (Nameless(), "its name is None"),
        (policy_of(name="a,b"), "its name is 'a,b'"),
        (policy_of(name="a" * 65), "its name is 'aaa"),
        (policy_of(uses=("delay_wait",)), "uses ('delay_wait',) (allowed: None, or a tuple of"),
        (policy_of(uses=["delay_weight"]), "uses ['delay_weight'] (allowed: None"),
        (policy_of(choose=lambda *_: None), "overrides choose (allowed: filter, score and pick)"),
        (
            type("NoScore", (Policy,), {"name": "x"})(),
            "policy x: score: raised NotImplementedError",
        ),
        (policy_of(score=lambda _: None), "score: raised TypeError"),
        (policy_of(score=lambda *_: np.ones(3)), "score: returned an array"),
        (
            policy_of(filter=lambda _, table, __: np.zeros(len(table), bool)),
            "policy made filters out every candidate",
        ),
    ],
)
def test_a_bad_policy_is_refused_at_start_with_words(made, reason):
    with pytest.raises(ConfigError) as refused:
        checked_policy("entry point fast", made)
    assert str(refused.value).startswith("entry point fast: ")
    assert reason in str(refused.value)


def test_the_policy_in_the_readme_does_what_it_says():
    text = (Path(router.scheduler.__file__).parent / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    names = {}
    exec(code, names)
    rows = [
        candidate(prefill_tokens=100, cached=2, decode_blocks=89, capacity=100),
        candidate(cached=9, decode_blocks=91, capacity=100),
        candidate(prefill_tokens=10, decode_blocks=5, capacity=100),
    ]
    choice = choose(names["ShortestPrefill"](), *rows)
    assert [rank.worker_id for rank in choice.table.ranks] == [1, 3]
    assert choice.costs.tolist() == [100 + 160 - 32, 170]
    assert choice.chosen.rank.worker_id == 3
    assert choose(names["ShortestPrefill"](), rows[1]).chosen.rank.worker_id == 1
