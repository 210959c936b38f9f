from itertools import pairwise
from random import Random

from router.simulator.workloads.chat_users import ChatUsers


def test_each_turn_has_all_of_the_turn_before():
    trace = ChatUsers(conversations=6, turns=3).trace(16, Random(1))
    for first in range(0, 18, 3):
        turns = trace.requests[first : first + 3]
        assert len({turn.session for turn in turns}) == 1
        for before, turn in pairwise(turns):
            assert turn.sequence_hashes[: len(before.sequence_hashes)] == before.sequence_hashes
            assert turn.isl_tokens > before.isl_tokens + before.osl_tokens


def test_as_many_conversations_as_users_go_on_at_once():
    trace = ChatUsers(conversations=7, users=3, turns=2).trace(16, Random(1))
    firsts = [request.after for request in trace.requests[::2]]
    assert firsts == [(), (), (), (1,), (3,), (5,), (7,)]
    assert [request.after for request in trace.requests[1::2]] == [(2 * i,) for i in range(7)]


def test_conversations_share_system_prompts():
    trace = ChatUsers(conversations=40, turns=1, systems=3).trace(16, Random(1))
    assert len({request.sequence_hashes[0] for request in trace.requests}) == 3
