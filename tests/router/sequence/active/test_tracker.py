"""Reservations of all ranks: by id, by rank, by expiry."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.protocol.requests import PromptRequest
from router.protocol.values import SCHEME, Identity, Rank
from router.sequence import rank_table
from router.sequence.active._booking_rows import MOST_FIRST_TOKENS
from router.sequence.active.errors import DuplicateReservationError, ReservationNotFoundError
from router.sequence.active.prompt import Prompt
from router.sequence.active.tracker import FirstToken, InferredPrefillEnd, Tracker
from router.sequence.rank_table import (
    COMPLETED_CONTEXTS,
    COMPLETED_TOKENS,
    DECODE_BLOCKS,
    PREFILL_TOKENS,
    QUEUED_TOKENS,
    REQUESTS,
    TRUST_WEIGHT,
    RankTable,
)
from support.chaos.fuzzing import examples

A, B = Rank(1, 0), Rank(2, 0)


def prompt(tokens=10, first=0, overlap_blocks=0):
    request = PromptRequest(token_ids=list(range(first, first + tokens)))
    return Prompt(request).hashed(Identity(SCHEME, 4)).footprint(overlap_blocks)


def of_two_ranks(ttl_s):
    table = RankTable()
    table.add(A)
    table.add(B)
    return Tracker(ttl_s, table), table


@pytest.fixture
def tracker():
    return of_two_ranks(100.0)[0]


def test_writes_the_load_of_each_rank_where_decisions_read_it():
    tracker, table = of_two_ranks(100.0)
    tracker.book("x", A, prompt(10, overlap_blocks=1), now_s=0.0)
    row = table.values[table.slot(A)]
    assert (row[PREFILL_TOKENS], row[DECODE_BLOCKS], row[REQUESTS]) == (6, 3, 1)
    assert not table.values[table.slot(B)].any()
    tracker.prefill_complete("x", 1.0)
    tracker.add_output_blocks("x", 1, None, 1.0)
    assert (row[PREFILL_TOKENS], row[DECODE_BLOCKS]) == (0, 4)
    tracker.free("x", 2.0)
    assert not row[:COMPLETED_TOKENS].any()


def queued(tracker, table):
    """Tokens that are queued on A, as left to compute, and by Dynamo's rule."""
    row = table.values[table.slot(A)]
    return row[QUEUED_TOKENS], row[PREFILL_TOKENS]


def test_a_prefix_that_a_queued_prompt_has_is_computed_once():
    tracker, table = of_two_ranks(100.0)
    tracker.book("first", A, prompt(10), now_s=0.0)
    tracker.book("equal", A, prompt(10), now_s=0.0)
    tracker.book("longer", A, prompt(30), now_s=0.0)
    assert queued(tracker, table) == (10 + 2 + 22, 50)  # whole blocks of four are shared
    tracker.book("elsewhere", B, prompt(10), now_s=0.0)
    assert table.values[table.slot(B)][QUEUED_TOKENS] == 10
    tracker.prefill_complete("first", 1.0)
    assert queued(tracker, table) == (2 + 22, 40)


def test_a_prompt_that_an_engine_has_complete_needs_its_last_block_alone():
    tracker, table = of_two_ranks(100.0)
    tracker.book("first", A, prompt(12), now_s=0.0)
    tracker.prefill_complete("first", 1.0)
    tracker.book("equal", A, prompt(12), now_s=2.0)
    assert queued(tracker, table) == (4, 12)


def test_a_prompt_that_ends_before_it_is_computed_leaves_its_part_to_the_next():
    tracker, table = of_two_ranks(100.0)
    for request_id, tokens in (("first", 10), ("other", 8), ("equal", 10), ("third", 10)):
        tracker.book(request_id, A, prompt(tokens, 500 * (request_id == "other")), now_s=0.0)
    assert queued(tracker, table) == (10 + 8 + 2 + 2, 38)
    tracker.free("first", 1.0)
    assert queued(tracker, table) == (8 + 10 + 2, 28)
    tracker.free("equal", 1.0)
    assert queued(tracker, table) == (8 + 10, 18)


def first_tokens(trust_weight=1.0, **fields):
    tracker, table = of_two_ranks(100.0)
    row = table.values[table.slot(A)]
    row[TRUST_WEIGHT] = trust_weight
    for column, value in fields.items():
        row[getattr(rank_table, column.upper())] = value
    return tracker


def test_first_token_tells_how_long_a_prompt_took_alone():
    tracker = first_tokens()
    tracker.book("x", A, prompt(10, overlap_blocks=1), now_s=1.0)
    tracker.prefill_complete("x", 1.5)
    assert tracker.take_first_tokens() == [(A, FirstToken(0.5, 6.0, 6.0 * 7.0, 0.0, 0.0))]
    assert tracker.take_first_tokens() == []
    tracker.prefill_complete("x", 1.7)
    tracker.book("y", A, prompt(10, first=50), now_s=2.0)
    tracker.prefill_complete("y", 2.5)
    assert tracker.take_first_tokens() == [(A, FirstToken(0.5, 10.0, 50.0, 1.0, 10.0))]


def test_prompts_behind_another_tell_nothing():
    tracker = first_tokens()
    tracker.book("x", A, prompt(10), now_s=1.0)
    tracker.book("y", A, prompt(10, first=50), now_s=1.0)
    tracker.prefill_complete("y", 1.5)
    assert tracker.take_first_tokens() == []
    tracker.prefill_complete("x", 1.7)
    assert [rank for rank, _ in tracker.take_first_tokens()] == [A]


def test_prompts_before_another_tell_nothing():
    """Their last step may have computed a part of the other."""
    tracker = first_tokens()
    tracker.book("x", A, prompt(10), now_s=1.0)
    tracker.book("y", A, prompt(10, first=50), now_s=1.1)
    tracker.prefill_complete("x", 1.5)
    tracker.prefill_complete("y", 1.7)
    assert tracker.take_first_tokens() == []


def test_prompts_reported_complete_add_up():
    tracker, table = of_two_ranks(100.0)
    row = table.values[table.slot(A)]
    tracker.book("x", A, prompt(10, overlap_blocks=1), now_s=1.0)
    tracker.book("y", A, prompt(10, first=50), now_s=1.0)
    assert row[COMPLETED_TOKENS] == 0
    for request_id in ("x", "y", "x"):
        tracker.prefill_complete(request_id, 2.0, in_batch=request_id == "y")
    assert row[COMPLETED_TOKENS] == 6 + 10
    assert row[COMPLETED_CONTEXTS] == 6 * 7 + 10 * 5


def test_first_tokens_that_do_not_show_the_engine_alone_are_not_kept():
    for book, complete, fields in (
        ("x", {"in_batch": True}, {}),  # the time of the report is not that of the token
        ((7, "x"), {}, {}),  # another router saw it
        ("x", {}, {"foreign_requests": 1.0}),  # other prompts may be ahead
        ("x", {}, {"trust_weight": 0.5}),  # more may be cached than is known
    ):
        tracker = first_tokens(**fields)
        tracker.book(book, A, prompt(10), now_s=1.0)
        tracker.prefill_complete(book, 1.5, **complete)
        assert tracker.take_first_tokens() == []
    tracker = first_tokens()
    tracker.book("x", A, prompt(10), now_s=1.0)
    tracker.free("x", 2.0)
    assert tracker.take_first_tokens() == []


def test_usage_tells_what_an_uncertain_prompt_had_to_compute():
    tracker = first_tokens(trust_weight=0.0)
    tracker.book("x", A, prompt(10), now_s=1.0)
    tracker.prefill_complete("x", 1.5)
    tracker.free("x", 9.0, cached_tokens=4)
    assert tracker.take_first_tokens() == [(A, FirstToken(0.5, 6.0, 6.0 * 7.0, 0.0, 0.0))]


def test_first_tokens_are_limited_and_go_with_their_rank():
    tracker = first_tokens()
    for number in range(MOST_FIRST_TOKENS + 5):
        tracker.book(str(number), A, prompt(10), now_s=1.0)
        tracker.prefill_complete(str(number), 1.5)
    assert len(tracker.take_first_tokens()) == MOST_FIRST_TOKENS
    tracker.book("x", A, prompt(10), now_s=1.0)
    tracker.prefill_complete("x", 1.5)
    tracker.drop_rank(A)
    assert tracker.take_first_tokens() == []


def test_an_id_is_booked_once(tracker):
    tracker.book("x", A, prompt(), now_s=0.0)
    with pytest.raises(DuplicateReservationError) as caught:
        tracker.book("x", B, prompt(), now_s=0.0)
    assert caught.value.request_id == "x"
    assert tracker.active(B).active_requests == 0


def test_unknown_ids_raise_not_found(tracker):
    for command in (
        lambda: tracker.free("x", 0.0),
        lambda: tracker.prefill_complete("x", 0.0),
        lambda: tracker.add_output_blocks("x", 1, None, 0.0),
    ):
        with pytest.raises(ReservationNotFoundError):
            command()


def test_expires_without_progress_not_with_age(tracker):
    tracker.book("idle", A, prompt(), now_s=0.0)
    tracker.book("busy", A, prompt(), now_s=0.0)
    tracker.prefill_complete("busy", now_s=60.0)
    tracker.add_output_blocks("busy", 1, None, now_s=90.0)
    assert tracker.expire(99.0) == []
    assert tracker.expire(100.0) == [("idle", A)]
    assert tracker.expire(189.0) == []
    assert tracker.expire(190.0) == [("busy", A)]
    assert len(tracker) == 0


def test_dropping_a_rank_frees_what_is_booked_there(tracker):
    tracker.book("a1", A, prompt(), now_s=0.0)
    tracker.book("b1", B, prompt(), now_s=1.0)
    tracker.book("a2", A, prompt(), now_s=2.0)
    assert tracker.drop_rank(A) == ["a1", "a2"]
    assert "b1" in tracker
    assert len(tracker) == 1


class Consistent(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.tracker, self.now_s, self.live = of_two_ranks(10.0)[0], 0.0, {}

    @rule(request_id=st.sampled_from("abcdef"), rank=st.sampled_from([A, B]),
          tokens=st.integers(0, 20), first=st.integers(0, 1))  # fmt: skip
    def book(self, request_id, rank, tokens, first):
        if request_id not in self.live:
            self.tracker.book(request_id, rank, prompt(tokens, first), self.now_s)
            self.live[request_id] = self.now_s + 10.0

    @rule(request_id=st.sampled_from("abcdef"), fraction=st.none() | st.floats(0, 1),
          in_batch=st.booleans())  # fmt: skip
    def grow(self, request_id, fraction, in_batch):
        if request_id in self.live:
            self.tracker.add_output_blocks(request_id, 1, fraction, self.now_s, in_batch=in_batch)
            self.live[request_id] = self.now_s + 10.0

    @rule(request_id=st.sampled_from("abcdef"), in_batch=st.booleans())
    def complete(self, request_id, in_batch):
        if request_id in self.live:
            self.tracker.prefill_complete(request_id, self.now_s, in_batch=in_batch)
            self.live[request_id] = self.now_s + 10.0

    @rule(request_id=st.sampled_from("abcdef"))
    def free(self, request_id):
        if request_id in self.live:
            self.tracker.free(request_id, self.now_s)
            del self.live[request_id]

    @rule(passed_s=st.floats(0, 8))
    def wait(self, passed_s):
        self.now_s += passed_s
        due = {request_id for request_id, due_s in self.live.items() if due_s <= self.now_s}
        assert {request_id for request_id, _ in self.tracker.expire(self.now_s)} == due
        self.live = {i: due_s for i, due_s in self.live.items() if i not in due}

    @invariant()
    def holds(self):
        self.tracker.check_invariants()
        assert len(self.tracker) == len(self.live)


Consistent.TestCase.settings = settings(max_examples=examples(20))
TestConsistent = Consistent.TestCase


# ── Callers that do not report completed prompts ─────────────────────────────────────────────────


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
