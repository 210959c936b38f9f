"""The compiled hashes agree with the xxhash package, whatever the length, seed and memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from router.protocol.values import U64_MAX
from router.sequence.hashing._hash_kernel import block_hashes, chain_hashes
from router.sequence.hashing.block_hashes import chain, chain_hash, local_block_hashes, token_array

SEEDS = [0, 1, 1337, 2**31, 2**63 - 1, 2**63, U64_MAX]
LONG = [4096, 16_384, 65_535, 65_536, 65_537]
"""Tokens; the last is the longest window there is."""

RANDOM = np.random.default_rng(20)
TOKENS = RANDOM.integers(0, 2**32, size=3 * 65_537, dtype=np.uint32)
u64s = st.integers(0, U64_MAX)


def kernel_hashes(tokens, block_size, window, seed, blocks):
    hashes = np.full(blocks, 7, dtype=np.uint64)
    block_hashes(tokens, block_size, window, seed, hashes)
    return hashes.tolist()


def package_hashes(tokens, block_size, window, seed, blocks):
    starts = range(0, blocks * block_size, block_size)
    return [xxh3_64_intdigest(tokens[s : s + window].tobytes(), seed) for s in starts]


@pytest.mark.parametrize("seed", [*SEEDS, *RANDOM.integers(0, U64_MAX, 3, np.uint64).tolist()])
def test_agrees_at_every_length(seed):
    for window in [*range(1101 // 4 + 1), *LONG]:
        block_size = max(window - window % 2, 1)
        arguments = (TOKENS, block_size, window, seed, 2)
        assert kernel_hashes(*arguments) == package_hashes(*arguments), window


@given(st.binary(max_size=600), st.integers(1, 150), st.booleans(), u64s)
def test_agrees_on_any_tokens(content, block_size, eagle, seed):
    tokens = np.frombuffer(content[: len(content) // 4 * 4], dtype=np.uint32)
    hashes = local_block_hashes(tokens, block_size, seed=seed, eagle=eagle)
    blocks = max(len(tokens) - eagle, 0) // block_size
    assert hashes.dtype == np.uint64
    assert hashes.tolist() == package_hashes(tokens, block_size, block_size + eagle, seed, blocks)


@pytest.mark.parametrize("window", [1, 2, 3, 16, 40, 100])
@pytest.mark.parametrize("offset", range(4))
def test_reads_tokens_that_are_read_only_and_off_any_boundary(window, offset):
    content = bytes(offset) + TOKENS[:300].tobytes()
    tokens = np.frombuffer(content, dtype=np.uint32, offset=offset)
    assert not tokens.flags.writeable
    expected = package_hashes(TOKENS[:300], window, window, 1337, 3)
    assert kernel_hashes(tokens, window, window, 1337, 3) == expected
    assert local_block_hashes(tokens, window).tolist()[:3] == expected


@pytest.mark.parametrize("convert", [lambda t: t[::2], lambda t: t.astype(">u4")[::2]])
def test_reads_tokens_in_any_layout(convert):
    expected = local_block_hashes(np.ascontiguousarray(TOKENS[:256:2]), 16)
    assert local_block_hashes(convert(TOKENS[:256]), 16).tolist() == expected.tolist()


@pytest.mark.parametrize("block_size", [16, 17, 100, 65_536])
@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("length", [0, 1, 15])
def test_too_few_tokens_have_no_block(length, eagle, block_size):
    hashes = local_block_hashes(TOKENS[:length], block_size, eagle=eagle)
    assert hashes.shape == chain(hashes).shape == (0,)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("as_seed", [int, np.uint64])
def test_a_seed_is_any_u64(seed, as_seed):
    arguments = (TOKENS, 16, 16, as_seed(seed), 2)
    assert kernel_hashes(*arguments) == package_hashes(TOKENS, 16, 16, seed, 2)


@pytest.mark.parametrize("seed", [-1, U64_MAX + 1])
def test_a_seed_outside_u64_is_refused(seed):
    with pytest.raises(OverflowError):
        local_block_hashes(token_array(range(16)), 16, seed=seed)


@given(st.lists(u64s, max_size=40))
def test_chained_hashes_equal_single_ones(local_hashes):
    parent, expected = None, []
    for local_hash in local_hashes:
        parent = chain_hash(parent, local_hash)
        expected.append(parent)
    assert chain(local_hashes).tolist() == expected
    read_only = np.frombuffer(np.array(local_hashes, dtype=np.uint64).tobytes(), dtype=np.uint64)
    sequence_hashes = np.empty(len(local_hashes), dtype=np.uint64)
    chain_hashes(read_only, sequence_hashes)
    assert sequence_hashes.tolist() == expected


def test_leaves_its_input_as_it_was():
    tokens = TOKENS[:512].copy()
    local_hashes = local_block_hashes(tokens, 128)
    before = local_hashes.tolist()
    chain(local_hashes)
    assert (tokens == TOKENS[:512]).all()
    assert local_hashes.tolist() == before
