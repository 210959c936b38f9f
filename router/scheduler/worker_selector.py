"""The selection contract of NVIDIA's Dynamo (`WorkerSelector`), for programs written against it.

Input: workers with their configurations, a request and a block size. Output: a worker, the number
of blocks that the request requires, and its overlap there. Any of the core's policies can choose.
Source: Dynamo 1.0.2 and 1.6.1, `scheduling/selector.rs`.
"""

import math
from collections.abc import Collection, Mapping
from random import Random
from types import MappingProxyType

import numpy as np
from msgspec import Struct

from router.errors import InvalidFieldError
from router.protocol.requests import ConfigOverride
from router.protocol.values import Rank, Scope, ranks_of
from router.scheduler.errors import NoEndpointsError, WorkersOverloadedError
from router.scheduler.selector import Selector
from router.scheduler.settings import PolicySettings
from router.scheduler.terms import (
    COLUMNS,
    OVERLAP_DEVICE,
    OVERLAP_REMOTE,
    TAINT_FACTOR,
    FloatArray,
    TermTable,
)
from router.sequence.rank_table import (
    BLOCK_SIZE,
    DECODE_BLOCKS,
    HELD_BLOCKS,
    PREFILL_TOKENS,
    QUEUED_TOKENS,
)

_NONE: Mapping[Rank, int] = MappingProxyType({})


class WorkerConfig(Struct, frozen=True):
    """Configuration of a worker: its data-parallel ranks."""

    data_parallel_start_rank: int = 0
    data_parallel_size: int = 1


class SchedulingRequest(Struct, frozen=True, kw_only=True):
    """A request, and the state of the ranks for it.

    `overlaps`: leading blocks held; 0 if a rank is missing. `tree_sizes`: blocks held.
    `prefill_tokens`: booked tokens plus those of this request behind its overlap; if a rank is
    missing, all tokens of the request. `decode_blocks`: booked blocks, including this request's; if
    a rank is missing, unknown. `overloaded_worker_ids`: workers that must not be chosen.
    """

    isl_tokens: int
    overlaps: Mapping[Rank, int] = _NONE
    tree_sizes: Mapping[Rank, int] = _NONE
    prefill_tokens: Mapping[Rank, int] = _NONE
    decode_blocks: Mapping[Rank, int] = _NONE
    router_config_override: ConfigOverride | None = None
    allowed_worker_ids: Collection[int] | None = None
    pinned_worker: Rank | None = None
    overloaded_worker_ids: Collection[int] = ()


class WorkerSelection(Struct, frozen=True):
    """The chosen rank, the blocks of the request (the last may be incomplete), and those held."""

    worker: Rank
    required_blocks: int
    overlap_blocks: int


class WorkerSelector:
    """Dynamo's contract, implemented with one of our selectors."""

    __slots__ = ("_rng", "_selector", "_settings")

    def __init__(self, selector: Selector, settings: PolicySettings, rng: Random) -> None:
        self._selector = selector
        self._settings = settings
        self._rng = rng

    def select_worker(
        self, workers: Mapping[int, WorkerConfig], request: SchedulingRequest, block_size: int
    ) -> WorkerSelection:
        """Choose a rank. O(ranks).

        Raises NoEndpointsError if no worker, or none of those allowed, is left,
        WorkersOverloadedError if all that are left, or the pinned one, are overloaded, and
        InvalidFieldError for a request without tokens or blocks without tokens.
        """
        if request.isl_tokens <= 0:
            raise InvalidFieldError("isl_tokens", str(request.isl_tokens), "1 or more")
        if block_size <= 0:
            raise InvalidFieldError("block_size", str(block_size), "1 or more")
        ranks = _eligible(workers, request)
        values = _values(ranks, request, block_size)
        table = TermTable(Scope(), ranks, values, request.isl_tokens, None, 0.0)
        settings = self._settings.overridden(request.router_config_override)
        choice = self._selector.choose(table, settings, self._rng)
        rank = choice.table.ranks[choice.index]
        required_blocks = math.ceil(request.isl_tokens / block_size)
        return WorkerSelection(rank, required_blocks, request.overlaps.get(rank, 0))


def _eligible(workers: Mapping[int, WorkerConfig], request: SchedulingRequest) -> list[Rank]:
    """Return the ranks that may be chosen, in order."""
    allowed, pinned = request.allowed_worker_ids, request.pinned_worker
    ranks = [
        rank
        for worker_id in sorted(workers)
        if allowed is None or worker_id in allowed
        for rank in _ranks(worker_id, workers[worker_id])
        if pinned is None or rank == pinned
    ]
    if not ranks:
        raise NoEndpointsError("default", "default", "no eligible workers")
    overloaded = set(request.overloaded_worker_ids)
    free = [rank for rank in ranks if rank.worker_id not in overloaded]
    if not free:
        raise WorkersOverloadedError(None if pinned is None else pinned.worker_id)
    return free


def _ranks(worker_id: int, config: WorkerConfig) -> tuple[Rank, ...]:
    return ranks_of(worker_id, config.data_parallel_start_rank, config.data_parallel_size)


def _values(ranks: list[Rank], request: SchedulingRequest, block_size: int) -> FloatArray:
    values = np.zeros((len(ranks), COLUMNS))
    values[:, BLOCK_SIZE] = block_size
    values[:, TAINT_FACTOR] = 1.0
    for row, rank in zip(values, ranks, strict=True):
        overlap_blocks = request.overlaps.get(rank, 0)
        uncached_tokens = max(request.isl_tokens - overlap_blocks * block_size, 0)
        potential_tokens = request.prefill_tokens.get(rank, request.isl_tokens)
        row[OVERLAP_DEVICE : OVERLAP_REMOTE + 1] = overlap_blocks
        row[[PREFILL_TOKENS, QUEUED_TOKENS]] = potential_tokens - uncached_tokens
        row[DECODE_BLOCKS] = request.decode_blocks.get(rank, math.nan)
        row[HELD_BLOCKS] = request.tree_sizes.get(rank, 0)
    return values
