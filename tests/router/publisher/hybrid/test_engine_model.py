"""Random layouts, evictions and preemption: what is called exact is what the engine finds."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.hybrid import cached_tokens
from oracle.hybrid_engine import HybridEngine, random_groups
from router.protocol.values import SCHEME, Identity
from router.sequence.hashing.block_hashes import sequence_hashes, token_array
from support.chaos.fuzzing import examples
from support.engines.engines import Edge, batch

UNIT_TOKENS = 4


def predicted(edge, tokens):
    """The length that the journal says, and whether it is called exact."""
    hybrid, held = edge.journal.hybrid, edge.held()
    if hybrid is None:
        return 0, not held
    names = sequence_hashes(token_array(tokens), UNIT_TOKENS).tolist()
    at = {end * UNIT_TOKENS: name for end, name in enumerate(names, 1)}
    classes = [set(edge.journal.held_in_class(i).tolist()) for i in range(len(hybrid.counts))]
    length = cached_tokens(
        hybrid.layout,
        lambda end: at.get(end) in held,
        lambda index, end: at.get(end) in classes[index],
        len(tokens),
    )
    return length, not hybrid.layout.problem and not edge.orphans


def play(random):
    """Send prompts that share beginnings; yield each prediction with what the engine finds."""
    groups = random_groups(random, may_be_eagle=True)
    alignment = max(each.block_tokens for each in groups)
    engine = HybridEngine(
        groups,
        pool_blocks=random.randint(30, 150) * len(groups),
        retention_tokens=random.choice([0, 0, alignment, 4 * alignment]),
        chunk_tokens=random.choice([16, 40, 1000]),
    )
    edge = Edge(Identity(SCHEME, UNIT_TOKENS), hybrid=engine.settings)
    prompts = [[]]
    for _ in range(30):
        start = random.choice(prompts)
        start = start[: random.randint(0, len(start))]
        tokens = start + [random.randrange(3) for _ in range(random.randint(1, 60))]
        answer = [random.randrange(3) for _ in range(random.randint(1, 20))]
        prompts.append([*tokens, *answer])
        length, is_exact = predicted(edge, tokens)
        yield length, is_exact, engine.hit(tokens)
        engine.begin(tokens, answer)
        while engine.running and random.random() < 0.9:
            edge.normalizer.apply(batch(*engine.step()), edge.now_s)
    edge.normalizer.check_invariants()


@settings(max_examples=examples(3))
@given(st.integers(0, 2**32))
def test_a_length_that_is_called_exact_is_what_the_engine_finds(seed):
    for length, is_exact, truth in play(Random(seed)):
        assert not is_exact or length == truth


def test_most_lengths_can_be_called_exact():
    played = [each for seed in range(6) for each in play(Random(seed))]
    exact = sum(is_exact for _, is_exact, _ in played)
    assert exact > 0.9 * len(played)
