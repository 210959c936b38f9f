"""Runs scenarios by seed: many on all cores, or one with every fault and request shown.

python -m simulation.run --runs 20000 [--hybrid] [--write]
python -m simulation.run --seed 4711 [--faults 3] [--shrink]
"""

import argparse
import itertools
import logging
import multiprocessing
import sys
import time
from collections import Counter
from contextlib import contextmanager

from simulation import loop
from simulation.scenario import draw
from simulation.world import Result, Shared, World


def play(scenario, shared, tell=None):
    """Run a scenario to its end. An exception in it is a failure like any other."""
    world = None

    async def main(virtual_loop):
        nonlocal world
        world = World(virtual_loop, scenario, shared, tell)
        return await world.play()

    try:
        return loop.run(main)
    except Exception as error:  # noqa: BLE001 - the seed has to be printed
        counts = Counter() if world is None else world.server.counts
        return Result(scenario.seed, [f"{type(error).__name__}: {error}"], counts)


def shrunk(scenario, shared):
    """A scenario that fails like this one, with as few faults as taking them away singly gives."""
    index = 0
    while index < len(scenario.faults):
        smaller = scenario.without(index)
        if play(smaller, shared).failures:
            scenario = smaller
        else:
            index += 1
    return scenario


def run_seeds(seeds):
    """Runs of these seeds, in this process."""
    shared = Shared()
    for seed in seeds:
        with _in_silence():
            result = play(draw(seed), shared)
        yield result


@contextmanager
def _in_silence():
    """What goes wrong is counted here; telling it takes longer than doing it."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _run_chunk(seeds):
    return list(run_seeds(seeds))


def run_many(seeds, processes):
    """Results of many seeds, in no order, on several cores."""
    chunks = [seeds[start : start + 50] for start in range(0, len(seeds), 50)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for results in pool.imap_unordered(_run_chunk, chunks):
            yield from results


class Totals:
    """What many runs came to."""

    def __init__(self):
        self.runs = 0
        self.failed = []
        self.counts = Counter()
        self.simulated_s = 0.0
        self.settled_s = []

    def add(self, result):
        self.runs += 1
        self.counts.update(result.counts)
        self.simulated_s += result.simulated_s
        self.settled_s.append(result.settled_s)
        if result.failures:
            self.failed.append(result)

    def lines(self):
        """A report, failures last."""
        settled = sorted(self.settled_s)
        yield f"{self.runs} runs, {self.simulated_s:.0f} virtual seconds, {len(self.failed)} failed"
        yield f"settled after (s): median {settled[len(settled) // 2]:.2f}, most {settled[-1]:.2f}"
        for name, count in sorted(self.counts.items()):
            yield f"  {name:24} {count}"
        for result in self.failed[:20]:
            yield from failure_lines(result)


def failure_lines(result):
    """What failed, and how to see it again."""
    yield f"seed {result.seed}: {result.failures[0]} ({len(result.failures)} failures)"
    yield f"  PYTHONPATH=.:tests python -m simulation.run --seed {result.seed}"


def show(seed, faults, shrink):
    """One run, printed as it happens."""
    shared = Shared()
    scenario = draw(seed) if faults is None else draw(seed).first(faults)
    if shrink:
        with _in_silence():
            scenario = shrunk(scenario, shared)
    print(scenario)
    result = play(scenario, shared, print)
    print(f"counts: {dict(sorted(result.counts.items()))}")
    print(f"settled after {result.settled_s:.2f} s")
    for failure in result.failures[:40]:
        print(f"FAILED: {failure}")
    return result


def keep_totals(section, facts, runs, failed):
    """Keep how many runs there were, and how many failed, in `benchmarks/results`."""
    from report import keep  # needs benchmarks/, which runs that keep nothing do without
    from timing import Bounded

    rows = [
        Bounded("runs", runs, 20_000, "runs", 20_000, lower=False),
        Bounded("failed", failed, 1, "runs", 0, lower=True, note="a wrong answer called exact, "
                "a ghost, or a block lost for good"),
    ]  # fmt: skip
    keep("simulation", facts, {section: rows})


def facts_of(options):
    """Return machine, commit, date and load as of now."""
    from report import Benchmark

    kind = "runs with hybrid models" if options.hybrid else "runs"
    return Benchmark("simulation", "", f"{kind}, from seed {options.first} on").facts()


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="simulation.run")
    parser.add_argument("--seed", type=int, help="replay one run")
    parser.add_argument("--faults", type=int, help="only its first faults")
    parser.add_argument(
        "--shrink", action="store_true", help="leave out the faults it fails without"
    )
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--hybrid", action="store_true", help="only runs with hybrid models")
    parser.add_argument(
        "--write", action="store_true", help="keep the totals in benchmarks/results"
    )
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return bool(show(options.seed, options.faults, options.shrink).failures)
    seeds = itertools.count(options.first)
    if options.hybrid:
        seeds = filter(lambda seed: draw(seed).has_hybrids, seeds)
    seeds, started_s = list(itertools.islice(seeds, options.runs)), time.perf_counter()
    totals, facts = Totals(), facts_of(options) if options.write else None
    is_alone = options.processes == 1
    for result in run_seeds(seeds) if is_alone else run_many(seeds, options.processes):
        totals.add(result)
    print(*totals.lines(), sep="\n")
    if facts is not None:
        keep_totals("hybrid" if options.hybrid else "all", facts, totals.runs, len(totals.failed))
    print(f"{totals.runs / (time.perf_counter() - started_s):.0f} runs/s")
    return bool(totals.failed)


if __name__ == "__main__":
    sys.exit(main())
