"""The step duration and the cache size of an engine: a formula of five terms, and two others.

step_s = base_s + Σ over prefill chunks of c tokens behind a context of x
                    (c · prefill_token_s + c · (x + c / 2) · attention_token2_s)
       + decoding requests · decode_request_s + their resident KV tokens · decode_kv_token_s
"""

from collections.abc import Sequence
from typing import Annotated, Protocol, TypeAlias

from msgspec import Meta, Struct

_Seconds = Annotated[float, Meta(ge=0)]

Chunk: TypeAlias = tuple[int, int]
"""Tokens of a prompt computed in one step, and the tokens before them."""


class StepModel(Protocol):
    """The performance model of an engine.

    A step takes up to `chunk_tokens` tokens: one for every decoding request, the rest for prefill.
    `capacity_tokens` is the size of its KV cache.
    """

    @property
    def chunk_tokens(self) -> int:
        """The limit of tokens per step."""

    @property
    def capacity_tokens(self) -> int:
        """The size of the KV cache in tokens."""

    def step_s(self, chunks: Sequence[Chunk], decoding_requests: int, kv_tokens: int) -> float:
        """Return the duration of a step; `kv_tokens`: the decoding requests' contexts in total."""

    def growth_s(self, grown_tokens: int) -> float:
        """Return the extra duration of a decode step whose contexts grew by this many tokens."""


class EngineModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `StepModel` with the sum above as its step duration."""

    chunk_tokens: Annotated[int, Meta(ge=1)]
    base_s: Annotated[float, Meta(gt=0)]
    prefill_token_s: _Seconds
    attention_token2_s: _Seconds
    decode_request_s: _Seconds
    decode_kv_token_s: _Seconds
    capacity_tokens: Annotated[int, Meta(ge=1)]

    def step_s(self, chunks: Sequence[Chunk], decoding_requests: int, kv_tokens: int) -> float:
        """See `StepModel`. O(chunks)."""
        step_s = self.base_s + decoding_requests * self.decode_request_s
        step_s += kv_tokens * self.decode_kv_token_s
        for tokens, context_tokens in chunks:
            contexts = tokens * (context_tokens + tokens / 2)
            step_s += tokens * self.prefill_token_s + contexts * self.attention_token2_s
        return step_s

    def growth_s(self, grown_tokens: int) -> float:
        """See `StepModel`."""
        return grown_tokens * self.decode_kv_token_s


_MOCKER_KV_TOKEN_S = 3.42e-8


class MockerTiming(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `StepModel` with the timing of NVIDIA's mock engine (ai-dynamo-runtime 1.6.1, polynomial).

    prefill   16.5 ms + 0.0158 ms · n + 4.2e-7 ms · n²     n: new tokens of all prompts in the step
    decode     5.75 ms + 3.42e-5 ms · resident KV tokens

    Each where there is any, one after the other. Cached context costs nothing, and prompts computed
    together are one.
    """

    chunk_tokens: Annotated[int, Meta(ge=1)] = 8192
    capacity_tokens: Annotated[int, Meta(ge=1)]

    def step_s(self, chunks: Sequence[Chunk], decoding_requests: int, kv_tokens: int) -> float:
        """See `StepModel`. O(chunks)."""
        tokens = sum(tokens for tokens, _ in chunks)
        prefill_s = 16.5e-3 + 1.58e-5 * tokens + 4.2e-10 * tokens * tokens
        decode_s = 5.75e-3 + _MOCKER_KV_TOKEN_S * kv_tokens
        return prefill_s * bool(tokens) + decode_s * bool(decoding_requests)

    def growth_s(self, grown_tokens: int) -> float:
        """See `StepModel`."""
        return _MOCKER_KV_TOKEN_S * grown_tokens


class TiledTiming(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `StepModel` of an engine that computes whole tiles.

    A tile has `tile_tokens` tokens of a prompt, and attends to all groups of `group_tokens` keys up
    to its own. A decoding request takes `decode_request_s`, and the groups of its context.
    """

    chunk_tokens: Annotated[int, Meta(ge=1)]
    capacity_tokens: Annotated[int, Meta(ge=1)]
    tile_tokens: Annotated[int, Meta(ge=1)]
    group_tokens: Annotated[int, Meta(ge=1)]
    base_s: Annotated[float, Meta(gt=0)]
    tile_s: _Seconds
    group_s: _Seconds
    decode_request_s: _Seconds

    def step_s(self, chunks: Sequence[Chunk], decoding_requests: int, kv_tokens: int) -> float:
        """See `StepModel`. O(chunks)."""
        step_s = self.base_s + decoding_requests * self.decode_request_s
        groups = kv_tokens / self.group_tokens
        for tokens, context_tokens in chunks:
            tiles = -(-tokens // self.tile_tokens)
            step_s += tiles * self.tile_s
            last_key = context_tokens + (tiles + 1) * self.tile_tokens / 2
            groups += tiles * -(-last_key // self.group_tokens)
        return step_s + groups * self.group_s

    def growth_s(self, grown_tokens: int) -> float:
        """See `StepModel`."""
        return grown_tokens * self.group_s / self.group_tokens


def reference_engine(times_as_fast: float = 1.0) -> TiledTiming:
    """Return the reference engine (`worker_agent/reference`), 2 layers of 64, as measured.

    On one core of an AMD EPYC, steps of 512 tokens after 0 to 3,584, and of 1 to 32 requests.
    Attention takes most of the time: 0.16 ms for a tile of 16 tokens and a group of 64 keys.
    """
    return TiledTiming(
        chunk_tokens=2048,
        capacity_tokens=1_536_000,
        tile_tokens=16,
        group_tokens=64,
        base_s=0.2e-3 / times_as_fast,
        tile_s=1.04e-3 / times_as_fast,
        group_s=0.156e-3 / times_as_fast,
        decode_request_s=0.35e-3 / times_as_fast,
    )


def llama_70b() -> EngineModel:
    """Return a model of 70 B parameters on 8 × A100.

    It reads weights in 140 GB / 16 TB/s plus launches, computes prefill at half of 8 × 312 TFLOP/s,
    and stores 327,680 B of KV a token.
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
    """Return a model of 8 B parameters on one H100.

    16 GB / 3.35 TB/s, half of 990 TFLOP/s, 131,072 B of KV a token.
    """
    return EngineModel(
        chunk_tokens=8192,
        base_s=0.007,
        prefill_token_s=1 / 31_000,
        attention_token2_s=1.06e-9,
        decode_request_s=0.00005,
        decode_kv_token_s=3.9e-8,
        capacity_tokens=427_000,
    )


def gemma_27b() -> EngineModel:
    """Return a model of 27 B parameters with windows, 10 of 62 layers full attention, on 2 × H100.

    54 GB / 6.7 TB/s plus launches, half of 2 × 990 TFLOP/s. A group has 10 layers of 8,192 B a
    token, and 80 GB are left for all groups; a decoding request reads 52 windows of 1,024 tokens.
    """
    return EngineModel(
        chunk_tokens=8192,
        base_s=0.010,
        prefill_token_s=1 / 18_000,
        attention_token2_s=1.65e-10,
        decode_request_s=0.00012,
        decode_kv_token_s=1.2e-8,
        capacity_tokens=976_000,
    )


def qwen_next_80b() -> EngineModel:
    """Return a model of 80 B parameters, 3 B active, with states in 36 of 48 layers, on 4 × H100.

    An eighth of 4 × 990 TFLOP/s, as experts get few tokens each. A group has 12 layers of 2,048 B a
    token, or of 1 MiB a state, which is a block of 512 tokens; 108 GB are left for all groups.
    """
    return EngineModel(
        chunk_tokens=8192,
        base_s=0.010,
        prefill_token_s=1 / 80_000,
        attention_token2_s=4.0e-10,
        decode_request_s=0.00005,
        decode_kv_token_s=1.8e-9,
        capacity_tokens=4_390_000,
    )
