"""Forms of the same content, and malformed messages. Written by hand after the engines' sources."""

from typing import Any

from router.tools.conformance.events import (
    as_array,
    hashes,
    prompt,
    publish,
    removed,
    signed,
    stored,
    text,
    wide_hashes,
)
from router.tools.conformance.steps import (
    BLOCK_SIZE,
    Ask,
    EngineSpec,
    PublishBytes,
    Scenario,
    Step,
)

GROUP = "wire formats"
ARRAYS = "events as arrays (vLLM up to 0.23)"
WIDE = "32-byte hashes"
FIELDS = "fields that a reader does not know"
SIGNED = "signed hashes"
NO_BATCH = "payloads that are no batch"
SLIDING = "a sliding-window group"
A, B = text("a", 4), text("b", 4)
ASK_A = Ask(prompt(A), (4,))
AHEAD = [(A + B)[end : end + 1] for end in range(BLOCK_SIZE, len(A) + 1, BLOCK_SIZE)]
"""The token after each block, which names the block as well where an engine drafts (MTP)."""
SGLANG = (EngineSpec(kind="sglang"),)
PINNED = {"type": "BlockPinned", "block_hashes": [1]}
WINDOW: dict[str, Any] = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8}
MALFORMED = {"type": "BlockStored", "block_hashes": "oops"}


def scenario(name: str, *steps: Step, **fields: Any) -> Scenario:
    """Return a scenario of this group."""
    return Scenario(name, GROUP, steps, **fields)


SCENARIOS = (
    scenario("array, vLLM 0.9: 5 fields", publish(as_array(stored(A), 5)), ASK_A, cause=ARRAYS),
    scenario("array, vLLM 0.10: + medium", publish(as_array(stored(A), 6)), ASK_A, cause=ARRAYS),
    scenario("array, vLLM 0.12: + lora_name", publish(as_array(stored(A), 7)), ASK_A,
             cause=ARRAYS),
    scenario("array, vLLM 0.16: + extra_keys",
             publish(as_array(stored(A, extra_keys=[None] * 4), 8)), ASK_A, cause=ARRAYS),
    scenario("array, vLLM 0.23: 11 fields, one removed",
             publish(as_array(stored(A, kv_cache_spec_kind="full_attention"), 11)),
             publish(as_array(removed(A, 3), 2)), Ask(prompt(A), (3,)), cause=ARRAYS),
    scenario("map, 32-byte hashes, one removed",
             publish(stored(A, names=wide_hashes(A))),
             publish(removed(A, 3, names=wide_hashes(A))), Ask(prompt(A), (3,)), cause=WIDE),
    scenario("map, batch without rank", publish(stored(A), rank=None), ASK_A),
    scenario("map, an unknown field", publish(stored(A, from_the_future={"a": [1, 2]})), ASK_A,
             cause=FIELDS),
    scenario("map, vLLM 0.33: lookahead_token_ids",
             publish(stored(A, lookahead_token_ids=AHEAD)), Ask(prompt(A + B), (4,)),
             cause=FIELDS),
    scenario("map, vLLM 0.33: locality, ownership, session",
             publish(stored(A, locality="LOCAL", ownership=None, session_id="s-1")), ASK_A,
             cause=FIELDS),
    scenario("map, SGLang: signed hashes, one removed",
             publish(stored(A, names=signed(hashes(A)))),
             publish(removed(A, 3, names=signed(hashes(A)))), Ask(prompt(A), (3,)),
             engines=SGLANG, cause=SIGNED),
    scenario("hash stored unsigned, removed signed",
             publish(stored(A)), publish(removed(A, 3, 2, names=signed(hashes(A)))),
             Ask(prompt(A), (2,)), cause=SIGNED),
    scenario("map, medium left out of a removal",
             publish(stored(A)), publish(removed(A, 3, medium=None)), Ask(prompt(A), (3,))),
    scenario("an unknown event type beside a good one", publish(PINNED, stored(A)), ASK_A),
    scenario("a malformed event beside a good one", publish(MALFORMED, stored(A)), ASK_A),
    scenario("payload that is no batch, then a good one",
             PublishBytes(b"\xc1not msgpack"), publish(stored(A)), ASK_A, cause=NO_BATCH),
    scenario("empty payload, then a good one", PublishBytes(b""), publish(stored(A)), ASK_A,
             cause=NO_BATCH),
    scenario("partial block of 2 tokens behind whole ones",
             publish(stored(A)),
             publish(stored(B, 0, 1) | {"parent_block_hash": hashes(A)[-1],
                                        "token_ids": list(B[:2]), "block_size": 2}),
             Ask(prompt(A + B), (4,))),
    scenario("sliding-window group beside full attention",
             publish(stored(A, 0, 2, group_idx=0, kv_cache_spec_kind="full_attention"),
                     stored(A, group_idx=1, **WINDOW)),
             Ask(prompt(A), (2,)), cause=SLIDING),
    scenario("sliding-window group alone", publish(stored(A, group_idx=1, **WINDOW)),
             Ask(prompt(A), (0,)), cause=SLIDING),
    scenario("batch of rank 3 on rank 0's socket",
             publish(stored(A)), publish(stored(B), rank=3), ASK_A, Ask(prompt(B), (0,)),
             convention="the blocks are those of the socket's rank, or of the batch's: a matter of "
             "trust. 0 credits no rank; a rank that was never registered cannot be sent to."),
    scenario("an unknown medium (CXL)", publish(stored(A, medium="CXL")), Ask(prompt(A), (4,)),
             convention="the engine holds them, on a tier of unknown speed."),
    scenario("blocks of twice the registered size",
             publish(stored(A, 0, 2) | {"token_ids": list(A), "block_size": 2 * BLOCK_SIZE}),
             Ask(prompt(A), (0,)),
             convention="the engine holds all tokens; a router that was configured with another "
             "size can only refuse to count them."),
)  # fmt: skip
