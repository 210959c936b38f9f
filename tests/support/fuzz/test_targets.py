"""A short run of each fuzz target, and each input that a longer run has found."""

import zlib
from random import Random

import pytest

from support.fuzz.findings import FINDINGS
from support.fuzz.mutation import Mutator
from support.fuzz.run import TARGETS
from support.fuzz.target import accepts

INPUTS = 300
SLOW = ("recordings",)


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_inputs_are_read_or_refused_as_documented(name):
    target = TARGETS[name]
    mutator = Mutator(target.seeds(), target.form, Random(zlib.crc32(name.encode())))
    check = target.make()
    for _ in range(INPUTS // 10 if name in SLOW else INPUTS):
        accepts(check, target.refusals, mutator.next())


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_reach_the_parser(name):
    target = TARGETS[name]
    check = target.make()
    accepted = [accepts(check, target.refusals, seed) for seed in target.seeds()]
    assert any(accepted)


@pytest.mark.parametrize(
    ("name", "data"),
    [(name, data) for name, _, data in FINDINGS],
    ids=[f"{name}: {what}" for name, what, _ in FINDINGS],
)
def test_found_inputs_are_read_or_refused_as_documented(name, data):
    target = TARGETS[name]
    accepts(target.make(), target.refusals, data)


def test_the_same_seed_makes_the_same_inputs():
    seeds = TARGETS["ranges"].seeds()
    one, other = (Mutator(seeds, "msgpack", Random(7)) for _ in range(2))
    assert [one.next() for _ in range(500)] == [other.next() for _ in range(500)]
