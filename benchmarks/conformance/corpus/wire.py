"""Ways of saying the same, and things that should not be said."""

from ..events import (
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
from ..steps import Ask, PublishBytes, Scenario, Step

GROUP = "wire formats"
A, B = text("a", 4), text("b", 4)
ASK_A = Ask(prompt(A), (4,))


def scenario(name: str, *steps: Step, **fields: str) -> Scenario:
    return Scenario(name, GROUP, steps, **fields)


SCENARIOS = (
    scenario("array, vLLM 0.9: 5 fields", publish(as_array(stored(A), 5)), ASK_A),
    scenario("array, vLLM 0.10: + medium", publish(as_array(stored(A), 6)), ASK_A),
    scenario("array, vLLM 0.12: + lora_name", publish(as_array(stored(A), 7)), ASK_A),
    scenario(
        "array, vLLM 0.16: + extra_keys",
        publish(as_array(stored(A, extra_keys=[None] * 4), 8)),
        ASK_A,
    ),
    scenario(
        "array, vLLM 0.23: 11 fields",
        publish(as_array(stored(A, kv_cache_spec_kind="full_attention"), 11)),
        ASK_A,
    ),
    scenario(
        "array, 32-byte hashes, one removed",
        publish(as_array(stored(A, names=wide_hashes(A)), 7)),
        publish(as_array(removed(A, 3, names=wide_hashes(A)), 2)),
        Ask(prompt(A), (3,)),
    ),
    scenario("map, batch without rank", publish(stored(A), rank=None), ASK_A),
    scenario("map, an unknown field", publish(stored(A, from_the_future={"a": [1, 2]})), ASK_A),
    scenario(
        "map, vLLM 0.33: lookahead_token_ids",
        publish(stored(A, lookahead_token_ids=[[9, 9], [9, 9], [9, 9], []])),
        ASK_A,
    ),
    scenario(
        "map, vLLM 0.33: locality, ownership, session",
        publish(stored(A, locality="LOCAL", ownership=None, session_id="s-1")),
        ASK_A,
    ),
    scenario(
        "map, SGLang: signed hashes, one removed",
        publish(stored(A, names=signed(hashes(A)))),
        publish(removed(A, 3, names=signed(hashes(A)))),
        Ask(prompt(A), (3,)),
    ),
    scenario(
        "hash stored unsigned, removed signed",
        publish(stored(A)),
        publish(removed(A, 3, 2, names=signed(hashes(A)))),
        Ask(prompt(A), (2,)),
    ),
    scenario("map, medium left out of a removal",
             publish(stored(A)), publish(removed(A, 3, medium=None)), Ask(prompt(A), (3,))),
    scenario("payload that is no batch, then a good one",
             PublishBytes(b"\xc1not msgpack"), publish(stored(A)), ASK_A),
    scenario("empty payload, then a good one", PublishBytes(b""), publish(stored(A)), ASK_A),
    scenario(
        "partial block of 2 tokens behind whole ones",
        publish(stored(A)),
        publish(stored(B, 0, 1) | {
            "parent_block_hash": hashes(A)[-1], "token_ids": list(B[:2]), "block_size": 2}),
        Ask(prompt(A + B), (4,)),
    ),
    scenario(
        "sliding-window group beside full attention",
        publish(
            stored(A, 0, 2, group_idx=0, kv_cache_spec_kind="full_attention"),
            stored(A, group_idx=1, kv_cache_spec_kind="sliding_window",
                   kv_cache_spec_sliding_window=8),
        ),
        Ask(prompt(A), (2,)),
    ),
    scenario(
        "batch of rank 3 on rank 0's socket",
        publish(stored(A)),
        publish(stored(B), rank=3),
        ASK_A,
        Ask(prompt(B), (0,)),
        convention="whose blocks they are is a matter of trust: the socket's rank, or the batch's. "
        "0 credits nobody; a credit for a rank that was never registered is a rank to send to.",
    ),
    scenario(
        "a medium nobody knows (CXL)",
        publish(stored(A, medium="CXL")),
        Ask(prompt(A), (4,)),
        convention="the engine holds them somewhere; how fast is anybody's guess.",
    ),
    scenario(
        "blocks of 8 tokens, 4 registered",
        publish(stored(A, 0, 2) | {"token_ids": list(A), "block_size": 8}),
        Ask(prompt(A), (0,)),
        convention="the engine holds all 16 tokens; a router that was told another size can only "
        "refuse to count them.",
    ),
)  # fmt: skip
