"""Pending selections: an exact model beside them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router.core.selections import Selection, SelectionLimits, Selections
from router.protocol.requests import SelectRequest
from router.protocol.values import Rank, Scope
from router.sequence.active.prompt import CallerHashes

LIMITS = SelectionLimits(ttl_s=10.0, max_entries=4, max_bytes=9_000)
SCOPES = (Scope("m", "g"), Scope("m", "other"))
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["keep", "find", "reserved"]),
        st.sampled_from(SCOPES),
        st.sampled_from("abcdefg"),
        st.integers(0, 200),
        st.floats(0, 4),
    ),
    max_size=60,
)


def selection(blocks, **fields):
    request = SelectRequest(token_ids=list(range(4 * blocks)), **fields)
    return Selection.of(request, Rank(1, 0), np.arange(blocks, dtype=np.uint64), None)


class Model:
    """The definition: a list, newest last."""

    def __init__(self):
        self.kept = []

    def keep(self, key, selection, now_s):
        self.kept = [each for each in self.kept if each[0] != key]
        self.kept.append((key, selection, now_s + LIMITS.ttl_s))
        while (
            len(self.kept) > LIMITS.max_entries
            or sum(each.size_bytes for _, each, _ in self.kept) > LIMITS.max_bytes
        ):
            del self.kept[0]

    def find(self, key):
        return next((each for known, each, _ in self.kept if known == key), None)

    def expire(self, now_s):
        self.kept = [each for each in self.kept if each[2] > now_s]


@given(STEPS)
def test_selections_are_as_defined(steps):
    selections, model, now_s = Selections(LIMITS), Model(), 0.0
    for step, scope, selection_id, blocks, later_s in steps:
        now_s += later_s
        key = (scope, selection_id)
        model.expire(now_s)
        if step == "keep":
            kept = selection(blocks)
            selections.keep(key, kept, now_s)
            model.keep(key, kept, now_s)
        elif step == "find":
            assert selections.find(key, now_s) is model.find(key)
        elif selections.find(key, now_s) is not None:
            selections.reserved(key)
            model.kept = [each for each in model.kept if each[0] != key]
        selections.check_invariants()
        assert len(selections) <= LIMITS.max_entries


def test_every_selection_is_accounted_for():
    selections = Selections(LIMITS)
    for at_s, name in enumerate("aabcdef"):
        selections.keep((SCOPES[0], name), selection(1), float(at_s))
    selections.reserved((SCOPES[0], "f"))
    assert selections.counts == {"reserved": 1, "replaced": 1, "expired": 0, "evicted": 2}
    selections.expire(100.0)
    assert (len(selections), selections.size_bytes) == (0, 0)
    assert selections.counts["expired"] == 3


def test_selection_over_the_limit_is_not_kept():
    selections = Selections(LIMITS)
    selections.keep((SCOPES[0], "a"), selection(10_000), 0.0)
    assert (len(selections), selections.counts["evicted"]) == (0, 1)


def test_a_selection_of_tokens_is_booked_by_hashes():
    request = selection(3, selection_id="s", lora_name="l", expected_output_tokens=7).request
    assert (request.token_ids, request.sequence_hashes, request.isl_tokens) == (None, [0, 1, 2], 12)
    assert (request.request_id, request.worker_id, request.lora_name) == ("s", 1, "l")
    assert request.expected_output_tokens == 7


def test_a_selection_by_hashes_is_booked_by_the_same():
    request = SelectRequest(
        selection_id="s", block_hashes=[-1, 5], sequence_hashes=[8, -2], isl_tokens=9
    )
    sent = CallerHashes.of(request)
    booked = Selection.of(request, Rank(1, 0), np.empty(0, np.uint64), sent).request
    assert booked.block_hashes == [2**64 - 1, 5]
    assert booked.sequence_hashes == [8, 2**64 - 2]
    assert booked.isl_tokens == 9
