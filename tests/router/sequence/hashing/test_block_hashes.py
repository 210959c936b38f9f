"""Block names agree with the field, byte for byte."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.requests import BlockMmInfo
from router.sequence.hashing.block_hashes import (
    chain,
    chain_hash,
    hash_seed,
    local_block_hash,
    local_block_hashes,
    sequence_hashes,
    token_array,
)

VECTORS = json.loads(
    (Path(__file__).parents[3] / "vectors" / "block_hashes.json").read_text("utf-8")
)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=80)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_agrees_with_two_independent_implementations(vector):
    local_hashes = local_block_hashes(
        token_array(vector["tokens"]),
        vector["block_size"],
        seed=hash_seed(vector["lora_name"], vector["cache_salt"]),
        block_mm_infos=msgspec.convert(vector["mm"], list[BlockMmInfo | None] | None),
        eagle=vector["is_eagle"],
    )
    assert [str(h) for h in local_hashes] == vector["local_block_hashes"]
    assert [str(h) for h in chain(local_hashes).tolist()] == vector["sequence_hashes"]


def test_every_rule_has_a_vector():
    assert any(v["is_eagle"] for v in VECTORS)
    assert any(v["mm"] for v in VECTORS)
    assert any(v["lora_name"] and v["cache_salt"] for v in VECTORS)
    assert len({v["block_size"] for v in VECTORS}) > 10


def test_lora_and_salt_of_the_same_name_differ():
    assert hash_seed("x") != hash_seed(None, "x")


def test_empty_lora_and_salt_count_as_none():
    assert hash_seed("", "") == hash_seed(None, None) == 1337


@given(tokens, st.integers(1, 20), st.booleans())
def test_counts_full_blocks_only(token_ids, block_size, eagle):
    hashes = local_block_hashes(token_array(token_ids), block_size, eagle=eagle)
    assert len(hashes) == max(len(token_ids) - eagle, 0) // block_size


@given(tokens, st.integers(1, 80), st.booleans(), st.integers(0, 2**64 - 1))
def test_hashing_at_once_equals_hashing_in_two_parts(token_ids, block_size, eagle, seed):
    prompt = token_array(token_ids)
    in_two = chain(local_block_hashes(prompt, block_size, seed=seed, eagle=eagle))
    in_one = sequence_hashes(prompt, block_size, seed=seed, eagle=eagle)
    assert in_one.tolist() == in_two.tolist()


@given(tokens, st.integers(1, 20))
def test_one_block_at_a_time_gives_the_same_names(token_ids, block_size):
    array = token_array(token_ids)
    whole = chain(local_block_hashes(array, block_size)).tolist()
    parent, single = None, []
    for start in range(0, len(whole) * block_size, block_size):
        parent = chain_hash(parent, local_block_hash(array[start : start + block_size], 1337))
        single.append(parent)
    assert single == whole


@given(tokens.filter(lambda t: len(t) >= 8), st.data())
def test_a_changed_token_changes_its_block_and_all_later_ones(token_ids, data):
    position = data.draw(st.integers(0, len(token_ids) // 4 * 4 - 1))
    changed = list(token_ids)
    changed[position] ^= 1
    before = chain(local_block_hashes(token_array(token_ids), 4)).tolist()
    after = chain(local_block_hashes(token_array(changed), 4)).tolist()
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [i < position // 4 for i in range(len(same))]


def test_chains_by_hashing_parent_and_local_hash():
    pair = np.array([5, 7], dtype="<u8").tobytes()
    assert chain_hash(5, 7) == xxhash.xxh3_64_intdigest(pair, 1337)
    assert chain_hash(None, 7) == 7


@pytest.mark.parametrize("token", [-1, 2**32])
def test_tokens_are_u32(token):
    with pytest.raises(OverflowError):
        token_array([token])
