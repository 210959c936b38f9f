"""Rows of the comparison of one decision."""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from decision_fleets import Answer, OurFleet, PeerFleet, Shape, Tokens, World
from report import Benchmark, Section, report
from rows import Row
from timing import Bounded, CallTimes, Scale, alternate, call_times, median_us

from router.scheduler.policy.registry import builtin_policies

SELECT_GOALS_US = {512: 25.0, 8_192: 40.0}
CYCLE_GOALS_US = {512: 60.0, 8_192: 80.0}
FLEET_GOAL_US = 300.0
CALLS, HASHED_CALLS, FLEET_CALLS, QUICK_CALLS = 300, 320, 100, 48
AT_ONCE = 16
ROUNDS = 5

POLICIES = [policy.name for policy in builtin_policies()]


def select_rows(scale: Scale) -> list[Row]:
    rows = []
    for tokens, goal_us in SELECT_GOALS_US.items():
        world = World(Shape(16, 1, tokens))
        rows += _select_rows(world, world, _calls(scale, CALLS), goal_us)
    return rows


def hashed_rows(scale: Scale) -> list[Row]:
    """The peer's best interface: hashes in place of tokens; calls that are awaited together.

    The answers of both are read, and compared with what the chosen rank holds.
    """
    rows: list[Row] = []
    for tokens, goal_us in SELECT_GOALS_US.items():
        world, calls = World(Shape(16, 1, tokens)), _calls(scale, HASHED_CALLS)
        ours, peer = OurFleet(world), PeerFleet(world)
        sides = [
            _times_of_hashed(world, ours, calls),
            *(_peer_times_of_hashed(world, peer, calls, at_once) for at_once in (1, AT_ONCE)),
        ]
        own, one, several = map(median_us, alternate(sides, ROUNDS, warm_up=True))
        names = (f"{tokens}, hashes", f"{tokens}, hashes, {AT_ONCE} awaited together")
        rows += [
            Bounded(name, own, time_us, "µs", goal_us, lower=True)
            for name, time_us in zip(names, (one, several), strict=True)
        ]
    return rows


def _times_of_hashed(world: World, ours: OurFleet, calls: int) -> Callable[[int], CallTimes]:
    def times(_: int) -> CallTimes:
        answers: list[Answer] = []
        of_calls = call_times(
            lambda each: answers.append(ours.select_hashed(each)), world.new_hashed(calls)
        )
        world.require_right(answers)
        return of_calls

    return times


def _peer_times_of_hashed(
    world: World, peer: PeerFleet, calls: int, at_once: int
) -> Callable[[int], CallTimes]:
    def times(_: int) -> CallTimes:
        of_calls, answers = peer.hashed_times(world.new_hashed(calls), at_once)
        world.require_right(answers)
        return of_calls

    return times


def fleet_rows(scale: Scale) -> list[Row]:
    ours, peer = World(Shape(256, 8, 512)), World(Shape(256, 1, 512))
    return _select_rows(ours, peer, _calls(scale, FLEET_CALLS), FLEET_GOAL_US)


def cycle_rows(scale: Scale) -> list[Row]:
    rows: list[Row] = []
    for tokens, goal_us in CYCLE_GOALS_US.items():
        world, calls = World(Shape(16, 1, tokens)), _calls(scale, CALLS)
        ours, peer = OurFleet(world), PeerFleet(world)
        sides = [
            *(_times(world, partial(ours.cycle, policy=policy), calls) for policy in POLICIES),
            lambda _, w=world, p=peer, c=calls: p.cycle_times(w.new_prompts(c)),
        ]
        rows += _rows(world, alternate(sides, ROUNDS, warm_up=True), goal_us)
    return rows


def _select_rows(world: World, peer_world: World, calls: int, goal_us: float) -> list[Row]:
    ours, peer = OurFleet(world), PeerFleet(peer_world)
    sides = [
        *(_times(world, partial(ours.select, policy=policy), calls) for policy in POLICIES),
        lambda _: peer.select_times(peer_world.new_prompts(calls)),
    ]
    return _rows(world, alternate(sides, ROUNDS, warm_up=True), goal_us)


def _times(
    world: World, call: Callable[[Tokens], object], calls: int
) -> Callable[[int], CallTimes]:
    """A round: every prompt is new to all."""
    return lambda _: call_times(call, world.new_prompts(calls))


def _rows(world: World, results: Sequence[list[CallTimes]], goal_us: float) -> list[Row]:
    *ours, peer = map(median_us, results)
    tokens = world.shape.prompt_tokens
    return [
        Bounded(f"{tokens}, {policy}", time_us, peer, "µs", goal_us, lower=True)
        for policy, time_us in zip(POLICIES, ours, strict=True)
    ]


def _calls(scale: Scale, calls: int) -> int:
    return QUICK_CALLS if scale.quick else calls


MEASURE: dict[str, Callable[[Scale], list[Row]]] = {
    "select": select_rows,
    "hashes": hashed_rows,
    "cycle": cycle_rows,
    "fleet": fleet_rows,
}


def measured(titles: Mapping[str, str], arguments: Namespace) -> int:
    """Measure the chosen sections and print them; 0 if every cell meets its goal."""
    scale = Scale(arguments.quick)
    chosen = {name: Section(titles[name], partial(MEASURE[name], scale)) for name in arguments.only}
    shown = f"medians of {ROUNDS} interleaved rounds of {_calls(scale, CALLS)} calls, on one core"
    return report(chosen, Benchmark("decision", "peer", shown), arguments)
