"""Token blocks and sequences, against vectors, a plain list, and the table of the reference."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import InvalidFieldError
from router.sequence.hashing.block_hashes import chain, hash_seed, local_block_hashes, token_array
from router.sequence.hashing.tokens import (
    Families,
    InsufficientTokensError,
    PartialTokenBlock,
    TokenBlockEmptyError,
    TokenBlockFullError,
    TokenBlockIncompleteError,
    TokenBlockSequence,
    request_families,
    salt_hash,
    salted_family,
)

VECTORS = json.loads((Path(__file__).parents[3] / "vectors" / "token_blocks.json").read_text())
FAMILIES = request_families()
U32 = 2**32 - 1

token_lists = st.lists(st.integers(0, U32), max_size=40)


def sequence(tokens=(), block_size=4, families=FAMILIES):
    return TokenBlockSequence(list(tokens), block_size, families)


def names(of):
    return [(block.tokens, block.position, block.routed, block.salted) for block in of.blocks]


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["name"])
def test_names_are_those_of_the_field(case):
    salted = salted_family(int(case["salt_hash"]))
    of = sequence(case["tokens"], case["block_size"], Families(FAMILIES.routed, salted))
    assert [str(block.salted.block_hash) for block in of.blocks] == case["block_hashes"]
    assert [str(block.salted.sequence_hash) for block in of.blocks] == case["sequence_hashes"]


def test_a_salt_is_compact_json_of_what_a_request_has():
    assert salt_hash() == 1389868326933519382
    assert salt_hash(cache_salt="tenant-a") == 1306913871552960716
    assert salt_hash(lora_name="lora-1") == 11072486093065202448
    assert salt_hash("lora-1", "tenant-a") == 17955072790141112844


@given(token_lists, st.none() | st.just("lora"), st.none() | st.just("salt"))
def test_routed_names_are_those_of_the_index(tokens, lora_name, cache_salt):
    local = local_block_hashes(token_array(tokens), 4, seed=hash_seed(lora_name, cache_salt))
    blocks = sequence(tokens, families=request_families(lora_name, cache_salt)).blocks
    assert [block.routed.block_hash for block in blocks] == local.tolist()
    assert [block.routed.sequence_hash for block in blocks] == chain(local).tolist()


@given(st.lists(token_lists, max_size=6), st.integers(1, 7))
def test_any_partition_gives_the_same_names(parts, block_size):
    whole = sequence([token for part in parts for token in part], block_size)
    grown = sequence((), block_size)
    for part in parts:
        before = len(grown.blocks)
        assert grown.extend(part) == range(before, len(grown.blocks))
    assert names(grown) == names(whole)
    assert grown.tokens_at(0, len(grown)) == whole.tokens_at(0, len(whole))


@given(token_lists, st.integers(0, 50), token_lists, st.integers(1, 7))
def test_truncated_and_extended_again_the_names_are_the_same(tokens, length, more, block_size):
    of = sequence(tokens, block_size)
    of.truncate(length)
    of.extend(more)
    assert names(of) == names(sequence(tokens[:length] + more, block_size))


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, U32)),
        st.tuples(st.just("extend"), token_lists),
        st.tuples(st.just("truncate"), st.integers(0, 60)),
        st.tuples(st.just("unwind"), st.integers(0, 60)),
        st.tuples(st.sampled_from(["pop", "reset"])),
    ),
    max_size=15,
)


@given(steps, st.integers(1, 5))
def test_agrees_with_a_plain_list(steps, block_size):
    of, model = sequence((), block_size), []
    for name, *arguments in steps:
        follow(of, model, name, *arguments)
        assert (len(of), of.tokens_at(0, len(of))) == (len(model), model)
        assert len(of.blocks) == len(model) // block_size
    assert names(of) == names(sequence(model, block_size))


def follow(of, model, name, *arguments):
    """One step of both."""
    match name, *arguments:
        case "append", token:
            filled = of.append(token)
            model.append(token)
            is_full = len(model) % of.block_size == 0
            assert filled == (len(model) // of.block_size - 1 if is_full else None)
        case "extend", tokens:
            of.extend(tokens)
            model += tokens
        case "truncate", length:
            of.truncate(length)
            del model[length:]
        case "unwind", count if count > len(model):
            with pytest.raises(InsufficientTokensError, match=f"at most {len(model)}"):
                of.unwind(count)
        case "unwind", count:
            of.unwind(count)
            del model[len(model) - count :]
        case ("pop",):
            assert of.pop() == (model.pop() if model else None)
        case ("reset",):
            of.reset()
            model.clear()


def test_tokens_at_an_odd_range_are_none():
    of = sequence(range(10))
    assert of.tokens_at(3, 9) == [3, 4, 5, 6, 7, 8]
    assert of.tokens_at(9, 10) == [9]
    for start, end in ((5, 4), (0, 11), (-1, 2), (11, 12)):
        assert of.tokens_at(start, end) == []


def test_invalid_token_changes_nothing():
    of = sequence([1, 2, 3])
    for odd in (-1, 2**32):
        with pytest.raises(InvalidFieldError, match=f"tokens: {odd}"):
            of.extend([4, 5, odd])
        with pytest.raises(InvalidFieldError, match=f"tokens: {odd}"):
            of.append(odd)
    assert of.tokens_at(0, 3) == [1, 2, 3]
    with pytest.raises(InvalidFieldError, match="length: -1"):
        of.truncate(-1)
    with pytest.raises(InvalidFieldError, match="block_size: 0"):
        sequence((), 0)


def test_partial_block_accepts_tokens_up_to_its_size():
    block = PartialTokenBlock(4, FAMILIES)
    block.push(1)
    assert block.push_all([2, 3, 4, 5, 6]) == [5, 6]
    assert (len(block), block.remaining) == (4, 0)
    with pytest.raises(TokenBlockFullError, match="4 tokens"):
        block.push(5)
    assert block.pop() == 4
    with pytest.raises(TokenBlockIncompleteError, match="it has 3 tokens"):
        block.commit()
    assert [block.pop() for _ in range(3)] == [3, 2, 1]
    with pytest.raises(TokenBlockEmptyError):
        block.pop()


def test_a_committed_block_is_followed_by_an_empty_one():
    block = PartialTokenBlock(2, FAMILIES, tokens=[1, 2])
    first = block.commit()
    assert (len(block), block.position) == (0, 1)
    block.push_all([3, 4])
    second = block.commit()
    assert second.routed.parent_sequence_hash == first.routed.sequence_hash
    assert second.salted.parent_sequence_hash == first.salted.sequence_hash
