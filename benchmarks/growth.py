"""How searching and ingesting change as the tree and the fleet grow: rows, and a plot of them."""

import pathlib
from collections.abc import Mapping, Sequence
from statistics import median

from index_find import search_times
from index_ingest import new_workers, stored_times
from index_streams import Stream
from index_worlds import Path, World
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rows import Row
from timing import Quicker, Scale, median_us

PLOT = pathlib.Path(__file__).resolve().parent / "results" / "index-growth.svg"
DEPTH, EVENT_BLOCKS = 512, 128
BLOCKS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
QUICK_BLOCKS = BLOCKS[:-1]
WORKERS = (1, 4, 16, 64, 256, 1_024)
INGESTING_WORKERS, INGESTED_BLOCKS = 16, 16_384
"""By blocks: few, so that they hardly change a small tree."""

INGESTED_BY_ALL = 262_144

FIND, FIND_ALL, INGEST = "find", "find, all match", "ingest"
GOAL = 1

Series = dict[str, dict[int, Row]]
"""Rows by what was measured, then by size."""


def growth_rows(scale: Scale) -> list[Row]:
    """Searches for 512 blocks and ingestion of events of 128, by blocks and by workers; drawn."""
    by_blocks, by_workers = _by_blocks(scale), _by_workers(scale)
    draw({"blocks in the tree": by_blocks, "workers": by_workers})
    return [row for by in (by_blocks, by_workers) for rows in by.values() for row in rows.values()]


def _by_blocks(scale: Scale) -> Series:
    """One tree that grows; always another path of one holder."""
    world, filled = World(), 0
    series: Series = {FIND: {}, INGEST: {}}
    for blocks in QUICK_BLOCKS if scale.quick else BLOCKS:
        world.fill(blocks - filled, (DEPTH,))
        filled, size = blocks, f"{blocks:,} blocks"
        series[FIND][blocks] = _find(world, world.paths[DEPTH], f"{size}, {FIND}", scale)
        series[INGEST][blocks] = _ingest(world, INGESTING_WORKERS, INGESTED_BLOCKS, size, scale)
    return series


def _by_workers(scale: Scale) -> Series:
    """A tree of a million blocks; always another path of one holder, or one path that all hold."""
    series: Series = {FIND: {}, FIND_ALL: {}, INGEST: {}}
    for workers in WORKERS:
        world, size = World(), f"{workers:,} workers"
        world.fill(scale.blocks, (DEPTH,), workers)
        shared = world.new_path(DEPTH, range(workers))
        series[FIND][workers] = _find(world, world.paths[DEPTH], f"{size}, {FIND}", scale)
        series[FIND_ALL][workers] = _find(world, [shared], f"{size}, all", scale)
        series[INGEST][workers] = _ingest(world, workers, INGESTED_BY_ALL, size, scale)
    return series


def _find(world: World, paths: Sequence[Path], name: str, scale: Scale) -> Row:
    world.require_same_answers(paths[:3])
    chosen = world.random.integers(len(paths), size=(scale.rounds, scale.calls))
    ours, peer = search_times(world, [[paths[i] for i in of_round] for of_round in chosen])
    return Quicker(name, median_us(ours), median_us(peer), "µs", GOAL, lower=False)


def _ingest(world: World, workers: int, blocks: int, size: str, scale: Scale) -> Row:
    stream = Stream(world, new_workers(workers), blocks)
    *times, round_blocks = stored_times(world, stream, EVENT_BLOCKS, 1, scale.rounds)
    ours, peer = (median(each) / round_blocks for each in times)
    return Quicker(f"{size}, ingest", ours, peer, "ns/block", GOAL, lower=False)


def draw(panels: Mapping[str, Series]) -> None:
    """A column of panels for each axis: searches above, ingestion below."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, len(panels), sharey="row", squeeze=False)
    for column, (label, series) in enumerate(panels.items()):
        for name, rows in series.items():
            _plot(axes[int(name == INGEST)][column], name, rows)
        axes[1][column].set_xlabel(label)
    axes[0][0].set_ylabel("find_matches, 512 blocks, µs")
    axes[1][0].set_ylabel("bytes to visible, ns a block")
    for panel in axes.flat:
        panel.grid(alpha=0.3)
        panel.legend()
    PLOT.parent.mkdir(exist_ok=True)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": PLOT.stem}):
        figure.savefig(PLOT, metadata={"Date": None})


def _plot(panel: Axes, name: str, rows: Mapping[int, Row]) -> None:
    sizes, marker = list(rows), "s" if name == FIND_ALL else "o"
    style = {"marker": marker, "markersize": 4}
    panel.loglog(sizes, [rows[size].ours for size in sizes], "C0-", label=f"{name}, ours", **style)
    panel.loglog(sizes, [rows[size].peer for size in sizes], "C1--", label=f"{name}, peer", **style)
