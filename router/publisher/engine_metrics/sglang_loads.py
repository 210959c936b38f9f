"""The loads of SGLang's ranks in a response of `GET /v1/loads`, which has all that rates need.

`total_prefill_busy_us` is the time of prompts alone. `decode_moments` sums over decode steps of b
requests that took t: their number, b, t, b², b · t and the tokens. Two sums say as much of time as
the steps themselves would: Σ t = base · n + slope · Σ b, and Σ b · t = base · Σ b + slope · Σ b².
Source: SGLang 0.5.23, from 0.5.20 on.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from router.errors import WireError
from router.protocol.loads import LoadConstants, LoadCounters, LoadGauges, TimedWork
from router.protocol.values import UNREADABLE, DpRank, UInt
from router.publisher.engine_metrics.loads import EngineLoad

_US_PER_S = 1_000_000
_MOMENTS = 5
_ERROR = 0.03

_Moment = Annotated[float, Meta(ge=0)]


class _RankLoad(Struct, frozen=True):
    """The load of one rank; fields that older versions lack are 0."""

    dp_rank: DpRank = 0
    num_running_reqs: UInt = 0
    num_waiting_reqs: UInt = 0
    num_waiting_uncached_tokens: UInt = 0
    num_used_tokens: UInt = 0
    max_total_num_tokens: UInt = 0
    max_running_requests: UInt = 0
    total_prefill_uncached_tokens: UInt = 0
    total_prefill_busy_us: UInt = 0
    decode_moments: Sequence[_Moment] | None = None


class _Loads(Struct, frozen=True):
    loads: list[_RankLoad]


_decoder = msgspec.json.Decoder(_Loads)


def sglang_loads(body: bytes, block_size: int) -> dict[int, EngineLoad]:
    """Return the load of each rank in a response. Raises WireError."""
    try:
        found = _decoder.decode(body)
    except UNREADABLE as error:
        raise WireError(f"no loads of SGLang: {error}") from error
    return {each.dp_rank: _translated(each, max(block_size, 1)) for each in found.loads}


def _translated(load: _RankLoad, block_size: int) -> EngineLoad:
    prompts = LoadCounters(
        busy_s=load.total_prefill_busy_us / _US_PER_S,
        prefill_tokens=load.total_prefill_uncached_tokens,
    )
    steps, requests, took_us, squares, products = _moments(load)
    decoded = LoadCounters(
        steps=round(steps), busy_s=took_us / _US_PER_S, decode_requests=round(requests)
    )
    weighted = LoadCounters(
        steps=round(requests), busy_s=products / _US_PER_S, decode_requests=round(squares)
    )
    return EngineLoad(
        LoadGauges(
            running_requests=load.num_running_reqs,
            waiting_requests=load.num_waiting_reqs,
            waiting_uncached_tokens=load.num_waiting_uncached_tokens,
            kv_used_blocks=-(-load.num_used_tokens // block_size),
        ),
        LoadCounters(
            steps=decoded.steps,
            prefill_tokens=prompts.prefill_tokens,
            decode_requests=decoded.decode_requests,
        ),
        LoadConstants(
            max_running_requests=load.max_running_requests,
            num_blocks=load.max_total_num_tokens // block_size,
        ),
        timed=tuple(TimedWork(each, _ERROR) for each in (prompts, decoded, weighted)),
    )


def _moments(load: _RankLoad) -> Sequence[float]:
    """Return the sums that are used, or zeros: an engine may not have decoded yet."""
    moments = load.decode_moments or ()
    return moments[:_MOMENTS] if len(moments) > _MOMENTS else (0.0,) * _MOMENTS
