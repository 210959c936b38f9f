"""Admitted requests, and what is computed next."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.sequence.hashing.block_hashes import chain, local_block_hashes, token_array
from support.chaos.fuzzing import examples
from worker_agent.blocks.changes import BlockStored
from worker_agent.blocks.eviction.simple import LruEviction
from worker_agent.blocks.names import Naming
from worker_agent.blocks.pool import BlockPool
from worker_agent.reference.engine.batching import Batcher, GenerationRequest

BLOCK = 4


def batcher(num_blocks=32, max_batched_tokens=8, max_running=4):
    pool, naming = BlockPool(num_blocks, LruEviction()), Naming(bytes(16), "model")
    return Batcher(pool, naming, BLOCK, max_batched_tokens, max_running), pool


def request(request_id, tokens, max_tokens=2, **fields):
    prompt = list(range(tokens)) if isinstance(tokens, int) else tokens
    return GenerationRequest(request_id, prompt, max_tokens, **fields)


def step(batch, token=99):
    """One step; what was computed, as (id, start, stop)."""
    batch.admit()
    done = []
    for chunk in batch.plan():
        done.append((chunk.running.request.request_id, chunk.start, chunk.stop))
        batch.computed(chunk, token if chunk.samples else None)
    return done


def run(batch):
    while batch.has_work:
        assert step(batch)


def test_prefill_comes_in_chunks_and_decode_token_by_token():
    batch, _ = batcher()
    batch.add(request("a", 19, max_tokens=3))
    assert [step(batch) for _ in range(5)] == [
        [("a", 0, 8)], [("a", 8, 16)], [("a", 16, 19)], [("a", 19, 20)], [("a", 20, 21)],
    ]  # fmt: skip
    assert not batch.has_work


def test_decodes_come_first_then_prefill_fills_up():
    batch, _ = batcher()
    batch.add(request("a", 3, max_tokens=9))
    step(batch)
    batch.add(request("b", 20))
    assert step(batch) == [("a", 3, 4), ("b", 0, 7)]


def test_a_cached_prefix_is_not_computed_again():
    batch, _ = batcher()
    batch.add(request("a", 16))
    run(batch)
    batch.add(request("b", 16))
    assert step(batch)[0] == ("b", 12, 16)
    assert batch.running[0].cached_tokens == 12


def test_the_last_prompt_token_is_always_computed():
    batch, _ = batcher()
    for tokens, cached in ((16, 12), (17, 16), (4, 0), (5, 4)):
        batch.add(request("warm", 24))
        run(batch)
        batch.add(request("x", tokens))
        (admitted,) = batch.admit()
        assert admitted.cached_tokens == cached
        batch.abort("x")


def test_blocks_are_named_when_full_and_computed_decode_too():
    batch, pool = batcher()
    batch.add(request("a", 6, max_tokens=4))
    run(batch)
    names = [change.name.sequence_hash for change in pool.take_changes()]
    tokens = [*range(6), 99, 99, 99, 99]
    assert names == chain(local_block_hashes(token_array(tokens), BLOCK)).tolist()


def test_stored_blocks_name_their_parents():
    batch, pool = batcher()
    batch.add(request("a", 12))
    run(batch)
    names = [change.name for change in pool.take_changes()]
    parents = [None, *[name.sequence_hash for name in names[:-1]]]
    assert [name.parent_sequence_hash for name in names] == parents


def test_salts_do_not_share():
    batch, _ = batcher()
    batch.add(request("a", 12, cache_salt="x"))
    run(batch)
    batch.add(request("b", 12, cache_salt="y"))
    (admitted,) = batch.admit()
    assert admitted.cached_tokens == 0


def test_request_that_does_not_fit_holds_later_ones():
    batch, _ = batcher(num_blocks=4)
    batch.add(request("a", 10, max_tokens=3))
    batch.add(request("b", 10, max_tokens=3))
    batch.add(request("c", 2, max_tokens=1))
    assert [r.request.request_id for r in batch.admit()] == ["a"]
    assert batch.waiting_uncached_tokens(len) == 12 - 4 * 2
    assert batch.waiting_uncached_tokens(lambda _: 0) == 12
    run(batch)


def test_no_more_run_than_may():
    batch, _ = batcher(max_running=2)
    for name in "abc":
        batch.add(request(name, 2))
    assert len(batch.admit()) == 2


def test_equal_prompts_at_once_end_up_in_the_same_blocks():
    batch, pool = batcher(max_batched_tokens=64)
    for name in "ab":
        batch.add(request(name, 9, max_tokens=2))
    step(batch)
    first, second = batch.running
    assert first.blocks[:2] == second.blocks[:2]
    stored = [change for change in pool.take_changes() if isinstance(change, BlockStored)]
    assert len(stored) == 2
    pool.check_invariants()


def test_aborting_gives_everything_back():
    batch, pool = batcher(num_blocks=8)
    batch.add(request("a", 12))
    batch.add(request("b", 12))
    batch.add(request("c", 12))
    step(batch)
    assert batch.abort("a")
    assert batch.abort("c")
    assert not batch.abort("zz")
    run(batch)
    assert pool.used_blocks == 0
    pool.check_invariants()


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(1, 6)), max_size=12),
    st.integers(9, 30),
    st.integers(1, 16),
)
def test_all_requests_end_and_all_blocks_return(requests, num_blocks, max_batched_tokens):
    batch, pool = batcher(num_blocks, max_batched_tokens)
    for number, (family, tokens, max_tokens) in enumerate(requests):
        prompt = [*range(min(tokens, 8)), *([family] * max(tokens - 8, 0))]
        batch.add(request(str(number), prompt, max_tokens))
    while batch.has_work:
        assert step(batch)
        pool.check_invariants()
        for running in batch.running:
            assert running.registered == running.computed // BLOCK
            assert len(running.blocks) * BLOCK >= len(running.tokens) - 1
    assert pool.used_blocks == 0
