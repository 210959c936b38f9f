"""A prompt as ranks with different block sizes see it."""

import pytest

from router.errors import InvalidFieldError
from router.protocol.requests import PromptRequest
from router.protocol.values import SCHEME, U64_MAX, Identity
from router.sequence.active.prompt import MAX_PROMPT_TOKENS, Prompt, prepare


def hashed(tokens, block_size=4, **fields):
    request = PromptRequest(token_ids=list(range(tokens)), **fields)
    return Prompt(request).hashed(Identity(SCHEME, block_size))


def test_counts_the_incomplete_block_apart():
    assert (len(hashed(8).sequence_hashes), hashed(8).footprint(0).own_blocks) == (2, 0)
    assert (len(hashed(9).sequence_hashes), hashed(9).footprint(0).own_blocks) == (2, 1)
    assert (len(hashed(3).sequence_hashes), hashed(3).footprint(0).own_blocks) == (0, 1)
    assert (len(hashed(0).sequence_hashes), hashed(0).footprint(0).own_blocks) == (0, 0)


@pytest.mark.parametrize(
    ("tokens", "overlap", "cached"), [(8, 2, 1), (9, 2, 2), (8, 1, 1), (8, 0, 0), (0, 0, 0)]
)
def test_the_engine_computes_at_least_one_token(tokens, overlap, cached):
    assert hashed(tokens).cached_blocks(overlap) == cached


def test_eagle_drops_one_block_more():
    assert hashed(9).cached_blocks(2, eagle=True) == 1
    assert hashed(9).cached_blocks(0, eagle=True) == 0


def test_prefill_tokens_are_the_uncached_ones():
    assert hashed(10).prefill_tokens(2) == 2
    assert hashed(8).prefill_tokens(2) == 0


def test_prompt_is_hashed_once_per_identity():
    prompt = Prompt(PromptRequest(token_ids=list(range(64))))
    four, eight = Identity(SCHEME, 4), Identity(SCHEME, 8)
    assert prompt.hashed(four) is prompt.hashed(Identity(SCHEME, 4))
    assert len(prompt.hashed(eight).sequence_hashes) == 8
    assert len(prompt.hashed(Identity(SCHEME, 8, eagle=True)).sequence_hashes.tolist()) == 7


def test_tenants_and_adapters_do_not_meet():
    names = [hashed(8), hashed(8, cache_salt="a"), hashed(8, cache_salt="b"),
             hashed(8, lora_name="a"), hashed(8, lora_name="a", cache_salt="a")]  # fmt: skip
    assert len({h.sequence_hashes.tolist()[0] for h in names}) == len(names)


def by_hashes(hashes, isl_tokens, **fields):
    return PromptRequest(sequence_hashes=hashes, isl_tokens=isl_tokens, **fields)


def test_a_prompt_known_by_its_hashes_is_that_prompt():
    known = hashed(10)
    again = prepare(by_hashes(known.sequence_hashes.tolist(), 10), ()).hashed(Identity(SCHEME, 4))
    assert again.sequence_hashes.tolist() == known.sequence_hashes.tolist()
    assert (again.isl_tokens, again.footprint(0).own_blocks) == (10, 1)


def test_tokens_count_where_both_are_given():
    both = by_hashes([1], 4, token_ids=[1, 2, 3, 4])
    assert prepare(both, ()).hashed(Identity(SCHEME, 4)).sequence_hashes.tolist() != [1]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (PromptRequest(), "token_ids"),
        (by_hashes([1], None), "isl_tokens"),
        (by_hashes([1], MAX_PROMPT_TOKENS + 1), "isl_tokens"),
        (by_hashes([U64_MAX + 1], 4), "sequence_hashes"),
    ],
)
def test_hashes_that_are_no_prompt_are_refused(request_, field):
    with pytest.raises(InvalidFieldError) as caught:
        prepare(request_, ())
    assert caught.value.field == field
