"""The timing of NVIDIA's mock engine (ai-dynamo-runtime 1.6.1, polynomial), as a step model.

    prefill   16.5 ms + 0.0158 ms · n + 4.2e-7 ms · n²     n: new tokens of all prompts in the step
    decode     5.75 ms + 3.42e-5 ms · resident KV tokens

Cached context costs nothing there, and prompts computed together are one.
"""

from collections.abc import Sequence

from msgspec import Struct

from router.simulator.engine_model import Chunk


class MockerTiming(Struct, frozen=True, kw_only=True):
    """A `router.simulator.engine_model.StepModel`."""

    chunk_tokens: int = 8192
    capacity_tokens: int

    def step_s(self, chunks: Sequence[Chunk], decoding_requests: int, kv_tokens: int) -> float:
        """Prefill and decode one behind the other, each where there is any."""
        tokens = sum(tokens for tokens, _ in chunks)
        prefill_s = 16.5e-3 + 1.58e-5 * tokens + 4.2e-10 * tokens * tokens
        decode_s = 5.75e-3 + 3.42e-8 * kv_tokens
        return prefill_s * bool(tokens) + decode_s * bool(decoding_requests)

    def growth_s(self, decoding_requests: int) -> float:
        """Every context grows by a token."""
        return 3.42e-8 * decoding_requests
