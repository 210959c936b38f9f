"""Gauges per rank, read from the core at scrape time, for a limited number of ranks."""

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import astuple
from prometheus_client import CollectorRegistry

from router.core.core import RouterCore
from router.runtime.process.metrics import Row, Rows, expose, expose_each, gauge, info
from router.sequence import rank_table

_RATES = {
    "step": rank_table.BASE_S,
    "prompt_token": rank_table.PREFILL_S,
    "prompt_token_context": rank_table.CONTEXT_S,
    "decode_request": rank_table.DECODE_S,
    "kv_token": rank_table.KV_S,
}


class _ShownRank(NamedTuple):
    row: npt.NDArray[np.float64]
    state: str
    has_fault: bool


def _column(column: int, text: str) -> Row:
    return gauge(text, lambda rank: rank.row[column])


_METRICS: Rows = {
    "held_blocks": _column(rank_table.HELD_BLOCKS, "Blocks held, counted once per tier"),
    "active_requests": _column(rank_table.REQUESTS, "Requests reserved, by any router"),
    "active_prefill_tokens": _column(
        rank_table.PREFILL_TOKENS, "Prompt tokens reserved that remain to be computed"
    ),
    "active_decode_blocks": _column(
        rank_table.DECODE_BLOCKS, "Blocks reserved, shared ones counted once"
    ),
    "foreign_requests": _column(
        rank_table.FOREIGN_REQUESTS, "Requests reported beyond those reserved"
    ),
    "busy": _column(rank_table.BUSY, "1 above a threshold, as of the last decision"),
    "trust_weight": _column(rank_table.TRUST_WEIGHT, "Weight of a block of overlap in predictions"),
    "rate_relative_error": _column(
        rank_table.RATE_ERROR, "Standard error of predicted times, as a fraction"
    ),
    "trust": gauge("1 for the trust state a rank is in", lambda rank: {rank.state: 1}, "state"),
    "fault": gauge(
        "1 while something is wrong with its registration, as /ready?verbose says",
        lambda rank: rank.has_fault,
    ),
    "rate_seconds": gauge(
        "Learned time of a unit of each kind of work",
        lambda rank: {work: rank.row[column] for work, column in _RATES.items()},
        "work",
    ),
}


_WORKERS: Rows = {
    "worker": info("Names of a worker, to join with the metrics of its ranks", lambda names: names)
}


def expose_ranks(
    registry: CollectorRegistry,
    core: RouterCore,
    max_ranks: int,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Add the state of each rank, for the first `max_ranks` in order of id, and workers' names.

    A gauge counts the ranks beyond.
    """

    def shown() -> Iterator[tuple[tuple[int, ...], _ShownRank]]:
        now_s = clock()
        ranks = (rank for worker in core.fleet for rank in worker.announcement.ranks)
        for rank in islice(ranks, max_ranks):
            state = core.trust(rank, now_s).state
            has_fault = rank.worker_id in core.fleet.faulty or core.index.has_fault(rank)
            yield astuple(rank), _ShownRank(core.ranks.row(rank), state, has_fault)

    def names() -> Iterator[tuple[tuple[int], dict[str, str]]]:
        for worker in islice(core.fleet, max_ranks):
            announced = worker.announcement
            scope = {"model_name": announced.model_name, "routing_group": announced.routing_group}
            yield (announced.worker_id,), {"name": announced.name, **scope}

    hidden = gauge("Ranks beyond metrics_max_ranks", lambda ranks: max(0, len(ranks) - max_ranks))
    expose(registry, "kv_router_worker_", {"gauges_hidden": hidden}, core.ranks)
    expose_each(registry, "kv_router_worker_", _METRICS, ("worker_id", "dp_rank"), shown)
    expose_each(registry, "kv_router_", _WORKERS, ("worker_id",), names)
