"""No rank is left without requests because of wrong estimates, whatever its reports say."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.commands import Free
from router.protocol.loads import LoadCounters
from router.sequence.rank_table import BURSTS
from support.chaos.fuzzing import examples
from support.values.builders import World, rank

BOUND = 20
MEASURED = 3
STEP_S, IN_FLIGHT = 0.3, 6
CACHED_TOKENS = 4_000


class Engines:
    """Engines of a world, which report each request's work with a busy time that may be wrong."""

    def __init__(self, count, random):
        self.world = World(rng=random, default_policy="predictive")
        self.ranks = [rank(worker_id) for worker_id in range(1, count + 1)]
        for each in self.ranks:
            self.world.worker(each.worker_id)
        self.counters = {each: LoadCounters() for each in self.ranks}
        self.now_s, self.number, self.in_flight = 0.0, 0, []

    def serve(self, tokens, slowness):
        """Place a request and return its rank; the request placed some time ago ends.

        `slowness`: how many times as long its rank will report to have been busy; None: no report.
        """
        self.number, self.now_s = self.number + 1, self.now_s + STEP_S
        request_id = f"r{self.number}"
        placement, _ = self.world.book(request_id, self.prompt(tokens), self.now_s)
        self.in_flight.append((request_id, placement.rank, tokens, slowness))
        if len(self.in_flight) > IN_FLIGHT:
            self.end(*self.in_flight.pop(0))
        return placement.rank

    def prompt(self, tokens):
        """The cached prompt, or a part of it; longer ones are all different."""
        if tokens <= CACHED_TOKENS:
            return list(range(tokens))
        return [self.number, *range(1, tokens)]

    def end(self, request_id, chosen, tokens, slowness):
        self.world.core.handle(Free(request_id), self.now_s)
        if slowness is None:
            return
        before = self.counters[chosen]
        self.counters[chosen] = LoadCounters(
            steps=before.steps + 1,
            busy_s=before.busy_s + slowness * tokens * 1e-4,
            prefill_tokens=before.prefill_tokens + tokens,
            prefill_token_contexts=before.prefill_token_contexts + tokens**2 / 2,
            requests_received=before.requests_received + 1,
            requests_finished=before.requests_finished + 1,
        )
        self.world.report_load(chosen, self.now_s, counters=self.counters[chosen])

    def bursts(self, each):
        return self.world.core.ranks.row(each)[BURSTS]


@settings(max_examples=examples(25))
@given(
    st.integers(2, 4),
    st.randoms(use_true_random=False),
    st.lists(st.sampled_from([None, 1e-3, 0.5, 1.0, 2.0, 100.0, 1e6]), min_size=1, max_size=4),
)
def test_an_unmeasured_rank_gets_one_of_twenty_requests_per_rank(count, random, slowness):
    engines, waits = Engines(count, Random(random.random())), {}
    for each in engines.ranks:
        waits[each] = 0
    engines.world.cache(engines.ranks[0], list(range(CACHED_TOKENS)))  # the others lack it
    for _ in range(150):
        factors = dict(zip(engines.ranks, slowness, strict=False))
        tokens = random.choice((40, 2_000, CACHED_TOKENS))
        chosen = engines.serve(tokens, factors.get(random.choice(engines.ranks), 1.0))
        for each in engines.ranks:
            waits[each] = 0 if each == chosen else waits[each] + 1
            if engines.bursts(each) < MEASURED:
                assert waits[each] <= BOUND * count


@pytest.mark.parametrize("lies", [1, 2, 5])
def test_a_worker_whose_first_reports_are_wrong_gets_a_fair_share_within_a_minute(lies):
    engines, served = Engines(2, Random(3)), {}
    seen = dict.fromkeys(engines.ranks, 0)
    for number in range(400):  # two minutes
        tokens = 4_001 + number
        unlucky = engines.ranks[1]
        chosen = engines.serve(tokens, 100.0 if seen[unlucky] < lies else 1.0)
        seen[chosen] += 1
        if number >= 200:
            served[chosen] = served.get(chosen, 0) + 1
    assert served[engines.ranks[1]] == pytest.approx(100, rel=0.2)
