"""Random prompts with common beginnings, over an engine that evicts, preempts and gives up."""

import random

PREFIXES = [list(range(start, start + 40)) for start in (100, 200, 300)]


def random_load(engine, seed, prompts):
    """The engine compares every block that it reads with what was computed for it."""
    choice = random.Random(seed)
    for key in range(prompts):
        prefix = choice.choice(PREFIXES)
        engine.add(key, [*prefix[: choice.randrange(8, 40)], *range(key, key + 4)])
        for _ in range(choice.randrange(1, 5)):
            engine.step(choice.choice([4, 7, 30]))
            engine.quiesce()
        if len(engine.requests) > 2:
            oldest = next(iter(engine.requests))
            (engine.preempt if choice.random() < 0.3 else engine.finish)(oldest)
    for key in list(engine.requests):
        engine.finish(key)
    for _ in range(20):
        engine.step()
        engine.quiesce()
    engine.drain()
    assert engine.loaded_tokens > 0
    assert engine.leader.counters.refused == 0
