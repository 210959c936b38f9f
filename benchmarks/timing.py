"""Interleaved rounds, and the rows made of them."""

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from time import perf_counter_ns
from typing import TypeVar

from rows import Row

T = TypeVar("T")

CallTimes = list[int]
"""Nanoseconds of each call of one round."""


class Scale:
    """How much is measured: all of it, or what ends within 45 s."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.rounds = 5 if quick else 7
        self.calls = 200 if quick else 1_000
        self.blocks = 1_000_000
        self.many_blocks = 2_000_000 if quick else 10_000_000
        self.stream_blocks = 131_072 if quick else 1_048_576
        self.mixed_passes = 1 if quick else 3

    def __str__(self) -> str:
        return (
            f"trees of {self.blocks:,} blocks, cold {self.many_blocks:,}; streams of "
            f"{self.stream_blocks:,}; medians of {self.rounds} interleaved rounds"
        )


class Quicker(Row, frozen=True):
    """Times; the ratio says how many times as long the peer takes."""

    @property
    def ratio(self) -> float:
        return self.peer / self.ours


class Bounded(Row, frozen=True):
    """A figure with a bound of its own; the peer's stands beside it for comparison."""

    is_bounded = True

    @property
    def holds(self) -> bool:
        return self.ours <= self.goal if self.lower else self.ours >= self.goal


def margin(row: Row) -> float:
    """How many times over it meets its goal; a goal of 0 is none, as nothing is best of all."""
    if not row.goal or (row.lower and not row.ours):
        return math.inf
    if isinstance(row, Bounded):
        return row.goal / row.ours if row.lower else row.ours / row.goal
    return row.goal / row.ratio if row.lower else row.ratio / row.goal


def alternate(
    sides: Sequence[Callable[[int], T]], rounds: int, *, warm_up: bool = False
) -> list[list[T]]:
    """Results of each side by round, the sides in turn; a warm-up is one more round, not kept."""
    results: list[list[T]] = [[] for _ in sides]
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds + warm_up):
            for side, kept in zip(sides, results, strict=True):
                kept.append(side(number))
    finally:
        gc.enable()
    return [kept[warm_up:] for kept in results]


def call_times(call: Callable[[T], object], arguments: Iterable[T]) -> CallTimes:
    """Time calls one by one; the iterator makes the next argument outside of the timed part."""
    times = []
    for argument in arguments:
        start = perf_counter_ns()
        call(argument)
        times.append(perf_counter_ns() - start)
    return times


def whole_time(call: Callable[[T], object], arguments: Sequence[T]) -> int:
    """Nanoseconds for all calls together."""
    start = perf_counter_ns()
    for argument in arguments:
        call(argument)
    return perf_counter_ns() - start


def median_us(rounds: Sequence[CallTimes]) -> float:
    """Median over the rounds of each round's median."""
    return median(median(times) for times in rounds) / 1e3


def p99_us(rounds: Sequence[CallTimes]) -> float:
    """Median over the rounds of each round's 99th percentile."""
    return median(sorted(times)[math.ceil(0.99 * len(times)) - 1] for times in rounds) / 1e3


def call_rows(
    name: str, goal: float, ours: Sequence[CallTimes], peer: Sequence[CallTimes]
) -> list[Row]:
    """Median and 99th percentile of calls."""
    return [
        Quicker(f"{name} {label}", figure(ours), figure(peer), "µs", goal, lower=False)
        for label, figure in (("median", median_us), ("p99", p99_us))
    ]


def pooled(rounds: Sequence[CallTimes]) -> Sequence[CallTimes]:
    """One round of all, where single rounds are too short for a 99th percentile."""
    return [[time_ns for times in rounds for time_ns in times]]


def rate_row(name: str, goal: float, ours: Sequence[int], peer: Sequence[int], blocks: int) -> Row:
    """Million blocks a second, of rounds of `blocks` blocks that took these times."""
    rates = [median(1e3 * blocks / time_ns for time_ns in times) for times in (ours, peer)]
    return Row(name, *rates, "M/s", goal, lower=False)
