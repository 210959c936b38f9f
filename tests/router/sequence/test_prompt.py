"""A prompt as ranks with different block sizes see it."""

import pytest

from router.protocol.requests import PromptRequest
from router.protocol.values import SCHEME, Identity
from router.sequence.prompt import Prompt


def hashed(tokens, block_size=4, **fields):
    request = PromptRequest(token_ids=list(range(tokens)), **fields)
    return Prompt(request).hashed(Identity(SCHEME, block_size))


def test_counts_the_incomplete_block_apart():
    assert (len(hashed(8).hash_list), hashed(8).own_blocks) == (2, 0)
    assert (len(hashed(9).hash_list), hashed(9).own_blocks) == (2, 1)
    assert (len(hashed(3).hash_list), hashed(3).own_blocks) == (0, 1)
    assert (len(hashed(0).hash_list), hashed(0).own_blocks) == (0, 0)


@pytest.mark.parametrize(
    ("tokens", "overlap", "cached"), [(8, 2, 1), (9, 2, 2), (8, 1, 1), (8, 0, 0), (0, 0, 0)]
)
def test_the_engine_computes_at_least_one_token(tokens, overlap, cached):
    assert hashed(tokens).cached_blocks(overlap) == cached


def test_eagle_drops_one_block_more():
    assert hashed(9).cached_blocks(2, eagle=True) == 1
    assert hashed(9).cached_blocks(0, eagle=True) == 0


def test_prefill_is_what_is_not_cached():
    assert hashed(10).prefill_tokens(2) == 2
    assert hashed(8).prefill_tokens(2) == 0


def test_is_hashed_once_for_each_identity():
    prompt = Prompt(PromptRequest(token_ids=list(range(64))))
    four, eight = Identity(SCHEME, 4), Identity(SCHEME, 8)
    assert prompt.hashed(four) is prompt.hashed(Identity(SCHEME, 4))
    assert len(prompt.hashed(eight).hash_list) == 8
    assert len(prompt.hashed(Identity(SCHEME, 8, eagle=True)).hash_list) == 7


def test_tenants_and_adapters_do_not_meet():
    names = [hashed(8), hashed(8, cache_salt="a"), hashed(8, cache_salt="b"),
             hashed(8, lora_name="a"), hashed(8, lora_name="a", cache_salt="a")]  # fmt: skip
    assert len({h.hash_list[0] for h in names}) == len(names)
