"""Terms of candidates, and the policy's choice among them."""

from random import Random

from router.indexer.base import Overlap
from router.protocol.requests import PromptRequest
from router.protocol.values import SCHEME, Identity, Rank
from router.scheduler.cost import Terms
from router.scheduler.scheduler import PolicySettings, choose, weigh
from router.sequence.prompt import Prompt
from router.sequence.tracker import Tracker

FOUR, EIGHT = Identity(SCHEME, 4), Identity(SCHEME, 8)
A, B = Rank(1, 0), Rank(2, 0)


def test_weighs_each_candidate_under_its_own_identity():
    prompt = Prompt(PromptRequest(token_ids=list(range(20))))
    tracker = Tracker(ttl_s=1.0)
    tracker.book("x", B, prompt.hashed(EIGHT), 0, now_s=0.0)
    terms = weigh(
        prompt,
        [(A, FOUR), (B, EIGHT)],
        {FOUR: {A: Overlap(5, 5, 5, 5)}, EIGHT: {B: Overlap(1, 2, 2, 2)}},
        {A: 50, B: 10},
        tracker,
    )
    assert terms == [
        Terms(A, 4, 5, 4, 0, 5, 50),
        Terms(B, 8, 1, 1, 20 + 12, 3 + 1, 10),
    ]


def test_the_weight_trades_cached_prefix_for_load():
    cached_but_busy = Terms(A, 16, 10, 9, 0, 30, 0)
    idle = Terms(B, 16, 0, 0, 160, 10, 0)
    light, heavy = PolicySettings(1.0, 0.0), PolicySettings(3.0, 0.0)
    assert choose([cached_but_busy, idle], light, Random(0)).chosen is idle
    assert choose([cached_but_busy, idle], heavy, Random(0)).chosen is cached_but_busy


def test_a_choice_names_its_policy_and_every_cost():
    terms = [Terms(A, 16, 0, 0, 160, 10, 0), Terms(B, 16, 0, 0, 32, 10, 0)]
    choice = choose(terms, PolicySettings(1.0, 0.0), Random(0))
    assert (choice.policy, choice.costs, choice.index) == ("dynamo-1.0", [20.0, 12.0], 1)
