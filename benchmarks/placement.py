"""Placement by cached prefix against round-robin: the same conversations, the same fleet.

    python benchmarks/placement.py [--quick] [--json]

Starts a bus, a router and three workers with the reference engine, and runs the conversations
that ship with the project in turn both ways, caches cleared before each run. Figures are medians
over the rounds.
"""

import asyncio
import sys
import tempfile
from pathlib import Path
from statistics import median

import httpx
from command_line import section_parser
from report import Benchmark, Section, report
from rows import Row

from router.tools.up.demo.demo import ConversationTurn, Demo, Summary, conversations
from router.tools.up.fleet import FleetPlan, reference_fleet

SECTIONS = {"demo": "the conversations that ship with the project, both ways"}
WORKERS = 3
ROUNDS = 5
QUICK_CONVERSATIONS, QUICK_TURNS = 4, 3


def main() -> int:
    arguments = section_parser(__doc__, SECTIONS).parse_args()
    workload = conversations()
    if arguments.quick:
        workload = [turns[:QUICK_TURNS] for turns in workload[::2][:QUICK_CONVERSATIONS]]
    requests = sum(len(turns) for turns in workload)
    scale = (
        f"{WORKERS} workers, {len(workload)} conversations, {requests} requests, "
        f"medians of {ROUNDS} interleaved runs"
    )
    section = Section(SECTIONS["demo"], lambda: asyncio.run(measure(workload)))
    return report({"demo": section}, Benchmark("placement", "round-robin", scale), arguments)


async def measure(workload: list[list[ConversationTurn]]) -> list[Row]:
    with tempfile.TemporaryDirectory() as directory:
        plan = FleetPlan(
            directory=Path(directory), workers=WORKERS, dp_size=1, num_blocks=2048, router_port=0
        )
        fleet = reference_fleet(plan)
        async with fleet.running(lambda text: print(text, file=sys.stderr)):
            await fleet.until_ready()
            async with httpx.AsyncClient(timeout=60) as client:
                ours, theirs = await alternate(Demo(client, fleet.router_url), workload)
    return [
        row("cached prompt tokens", "tokens", 1.0, "cached_tokens", ours, theirs, lower=False),
        row("TTFT, mean", "ms", 1.0, "mean_ttft_s", ours, theirs, lower=True, scale=1e3),
        row("TTFT, median", "ms", 1.0, "median_ttft_s", ours, theirs, lower=True, scale=1e3),
        row("TTFT, 90th percentile", "ms", 1.0, "p90_ttft_s", ours, theirs, lower=True, scale=1e3),
    ]


async def alternate(
    demo: Demo, workload: list[list[ConversationTurn]]
) -> tuple[list[Summary], list[Summary]]:
    """Routed and round-robin summaries, one of each a round, in turn."""
    await demo.look_around()
    await demo.warm_up(workload[0][0].prompt)
    ours, theirs = [], []
    for _ in range(ROUNDS):
        for place, results in ((demo.round_robin, theirs), (demo.by_router, ours)):
            await demo.forget_everything()
            results.append(Summary.of(await place(workload, lambda _: None)))
    return ours, theirs


def row(
    name: str,
    unit: str,
    goal: float,
    field: str,
    ours: list[Summary],
    theirs: list[Summary],
    *,
    lower: bool,
    scale: float = 1.0,
) -> Row:
    medians = [median(getattr(s, field) for s in each) * scale for each in (ours, theirs)]
    return Row(name, *medians, unit, goal, lower)


if __name__ == "__main__":
    sys.exit(main())
