"""How long an engine's steps take, and how much it remembers.

step_s = base_s + Σ over prefill chunks of c tokens behind a context of x
                    (c · prefill_token_s + c · (x + c / 2) · attention_token2_s)
       + decoding requests · decode_request_s + their resident KV tokens · decode_kv_token_s
"""

from typing import Annotated

from msgspec import Meta, Struct

_Seconds = Annotated[float, Meta(ge=0)]


class EngineModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of one engine. A step takes up to `chunk_tokens` tokens: one for every decoding
    request, the rest for prefill. `capacity_tokens` is the size of its KV cache.
    """

    chunk_tokens: Annotated[int, Meta(ge=1)]
    base_s: Annotated[float, Meta(gt=0)]
    prefill_token_s: _Seconds
    attention_token2_s: _Seconds
    decode_request_s: _Seconds
    decode_kv_token_s: _Seconds
    capacity_tokens: Annotated[int, Meta(ge=1)]

    def prefill_s(self, tokens: int, context_tokens: int) -> float:
        """What one chunk of a prompt adds to a step."""
        contexts = tokens * (context_tokens + tokens / 2)
        return tokens * self.prefill_token_s + contexts * self.attention_token2_s

    def decode_s(self, requests: int, kv_tokens: int) -> float:
        """What decoding requests add to a step."""
        return requests * self.decode_request_s + kv_tokens * self.decode_kv_token_s


def llama_70b() -> EngineModel:
    """70 B parameters on 8 × A100: weights read in 140 GB / 16 TB/s and launches, prefill at half
    of 8 × 312 TFLOP/s, 327,680 B of KV a token.
    """
    return EngineModel(
        chunk_tokens=2048,
        base_s=0.020,
        prefill_token_s=1 / 9_000,
        attention_token2_s=1.85e-9,
        decode_request_s=0.00015,
        decode_kv_token_s=2.0e-8,
        capacity_tokens=1_536_000,
    )


def llama_8b() -> EngineModel:
    """8 B parameters on one H100: 16 GB / 3.35 TB/s, half of 990 TFLOP/s, 131,072 B a token."""
    return EngineModel(
        chunk_tokens=8192,
        base_s=0.007,
        prefill_token_s=1 / 31_000,
        attention_token2_s=1.06e-9,
        decode_request_s=0.00005,
        decode_kv_token_s=3.9e-8,
        capacity_tokens=427_000,
    )
