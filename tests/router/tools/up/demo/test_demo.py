"""The conversations that ship with the project."""

import itertools

from router.tools.up.demo.demo import MAX_TURNS, conversations


def test_conversations_are_multi_turn_and_grow():
    for conversation in conversations():
        assert 2 <= len(conversation) <= MAX_TURNS
        for before, after in itertools.pairwise(conversation):
            assert after.prompt.startswith(before.prompt)
            assert after.number == before.number + 1


def test_conversations_share_system_prompts():
    firsts = [conversation[0].prompt.splitlines()[0] for conversation in conversations()]
    assert len(set(firsts)) == 3 < len(firsts)


def test_conversations_fit_the_model():
    tokens = [len(turn.token_ids) for conversation in conversations() for turn in conversation]
    assert max(tokens) < 4096 - 64
    assert all(0 <= token < 256 for token in conversations()[0][0].token_ids)
