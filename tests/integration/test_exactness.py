"""What the router predicts is what the engine finds, for every single request."""

import random

import pytest

from support.processes.servers import eventually

SYSTEM_PROMPTS = [
    list(f"{i}: you are assistant number {i}. Answer briefly and to the point. ".encode() * 4)
    for i in range(6)
]


def conversations(count, seed):
    """Multi-turn conversations that share system prompts, interleaved at random."""
    rng = random.Random(seed)
    turns = []
    for number in range(count):
        said = list(SYSTEM_PROMPTS[number % len(SYSTEM_PROMPTS)])
        prompts = []
        for turn in range(rng.randint(2, 4)):
            question = f"\nUser {number}: question {turn} {'why ' * rng.randint(1, 12)}?"
            said = said + list(question.encode())
            prompts.append(list(said))
            said = said + list(f"\nAssistant: {'because ' * rng.randint(1, 9)}".encode())
        turns.append(prompts)
    while turns:
        conversation = rng.choice(turns)
        yield conversation.pop(0)
        turns = [t for t in turns if t]


@pytest.mark.parametrize(
    ("workers", "num_blocks", "count", "evicts"),
    [
        (3, 2048, 12, False),
        (1, 128, 20, True),
        pytest.param(3, 128, 60, True, marks=pytest.mark.long),
    ],
)
async def test_predictions_equal_the_engines_own_count(fleet, workers, num_blocks, count, evicts):
    """Two ranks a worker, conversations; with a pool that holds everything, and a small one."""
    await fleet.start(workers=workers, dp_size=2, **{"num-blocks": num_blocks})
    await eventually(fleet.all_exact)
    reused = total = asked = exact = 0
    for prompt in conversations(count, seed=num_blocks):
        await fleet.until_drained()
        decision, answer = await fleet.ask(prompt, others_running=8)
        cached_tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert decision["predicted_cached_blocks"] * decision["block_size"] == cached_tokens
        asked += 1
        exact += decision["trust"]["state"] == "exact"
        reused += cached_tokens
        total += len(prompt)
    assert reused > total / 2
    assert exact > asked / 2  # on a busy machine a report may be late
    held = sum(len(hashes) for hashes in (await fleet.held_by_workers()).values())
    # Without evictions every full block that was computed is held; each prompt may end in a part.
    assert (held < (total - reused) // 16 - asked) == evicts
    assert len(await fleet.held_by_index()) > 1  # how many is the policy's business
