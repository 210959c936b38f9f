"""Names of blocks: equal exactly if everything is that a block's bytes depend on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import InvalidFieldError
from router.sequence.hashing.tokens import TokenBlockSequence, request_families
from worker_agent.blocks.names import Naming

SECRET = bytes(range(32))
NAMING = Naming(SECRET, "model")

prompts = st.lists(st.integers(0, 3), max_size=12)
salts = st.sampled_from([None, "a", "b"])


def names(tokens, cache_salt=None, lora_name=None, naming=NAMING):
    sequence = TokenBlockSequence(tokens, 2, request_families(lora_name, cache_salt))
    return naming.named(sequence.blocks, naming.root(lora_name, cache_salt))


contexts = st.tuples(salts, salts)


@given(prompts, prompts, contexts, contexts)
def test_equal_exactly_if_prompts_are(first, second, context, other_context):
    left, right = names(first, *context), names(second, *other_context)
    for index, (mine, theirs) in enumerate(zip(left, right, strict=False)):
        shared = first[: 2 * index + 2] == second[: 2 * index + 2]
        is_same = shared and context == other_context
        assert (mine.identity == theirs.identity) == is_same
        assert len(mine.identity) == 16


@given(prompts, st.integers(0, 6))
def test_named_in_parts_or_at_once_is_the_same(tokens, cut):
    sequence = TokenBlockSequence(tokens, 2, request_families())
    root, whole = NAMING.root(None, None), names(tokens)
    first = NAMING.named(sequence.blocks[:cut], root)
    rest = NAMING.named(sequence.blocks[cut:], root, first[-1] if first else None)
    assert first + rest == whole
    assert [name.parent_identity for name in whole] == [
        None, *[name.identity for name in whole[:-1]]
    ][: len(whole)]  # fmt: skip
    assert [name.sequence_hash for name in whole] == [
        block.routed.sequence_hash for block in sequence.blocks
    ]


def test_another_secret_or_model_names_otherwise():
    mine = names([1, 2])[0].identity
    assert names([1, 2], naming=Naming(SECRET[::-1], "model"))[0].identity != mine
    assert names([1, 2], naming=Naming(SECRET, "other"))[0].identity != mine


def test_joined_fields_are_unambiguous():
    assert NAMING.root("ab", "c") != NAMING.root("a", "bc")


@pytest.mark.parametrize("length", [0, 15, 65])
def test_a_secret_has_a_fit_length(length):
    with pytest.raises(InvalidFieldError, match=f"secret: {length} bytes"):
        Naming(bytes(length), "model")
