"""Replays for `scheduling.py`: what is replayed, and by which policy."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from functools import cache
from math import nan
from pathlib import Path
from random import Random

from msgspec import Struct, convert, json
from msgspec.structs import asdict, replace
from scheduling_rivals import WITH_SETTINGS

from router.config.core import make_core
from router.config.router import RouterConfig
from router.core.core import RouterCore
from router.runtime.process.settings import configured
from router.scheduler.selector import Selector
from router.simulator.engine_model import EngineModel, llama_70b
from router.simulator.mooncake import read_mooncake
from router.simulator.physics import PHYSICS
from router.simulator.scenario import SlowDown
from router.simulator.simulation import simulate
from router.simulator.summary import Summary, summarize
from router.simulator.traces import Trace, spread_arrivals
from router.simulator.workloads.objectives import ObjectiveMix
from router.simulator.workloads.registry import WORKLOADS

BLOCK_SIZE = 512
COUNTED = {"agentic-code": "sessions", "chat-users": "conversations", "rollouts": "groups"}
"""What `requests` counts of a workload in a closed loop."""

OBJECTIVES_SEED = 7
"""Which requests have tight objectives is the same for all policies and seeds."""

Options = tuple[tuple[str, int | float], ...]


class Case(Struct, frozen=True, kw_only=True):
    """One replay. `source`: a trace's path, or a workload's name, with `options`; `requests`: of a
    workload (in a closed loop its sessions or groups), or how many of a trace. `settings`: of the
    policy. `workers`: other than those of the physics. `slow_workers` take twice as long for
    everything; `slowing`: worker 0 takes three times as long from this second on. `spread`:
    requests of one moment come evenly until the next one. `half`: 1 or 2 of a trace, or the whole
    of it. `physics`: of `router.simulator.physics`. `slo`: requests have objectives. `full_only`:
    of hybrid models, the router learns of full attention only.
    """

    source: str
    policy: str
    options: Options = ()
    settings: tuple[tuple[str, float | str], ...] = ()
    requests: int | None = None
    arrival_speed: float = 1.0
    seed: int = 0
    workers: int = 0
    slow_workers: int = 0
    slowing: float | None = None
    routers: int = 1
    spread: bool = False
    half: int = 0
    physics: str = "plain"
    slo: bool = False
    full_only: bool = False

    @property
    def label(self) -> str:
        """The policy with its settings."""
        return f"{self.policy}:{self.told}" if self.told else self.policy

    @property
    def told(self) -> str:
        """Its settings."""
        each = (v if isinstance(v, str) else f"{v:g}" for _, v in self.settings)
        return ",".join(f"{name}={v}" for (name, _), v in zip(self.settings, each, strict=True))


def run_all(cases: Iterable[Case], pool: Executor) -> Iterator[tuple[Case, Summary]]:
    """Run every case in the processes of a pool. Yields each in turn, as soon as it is over."""
    wanted = list(dict.fromkeys(cases))
    yield from zip(wanted, pool.map(run, wanted), strict=True)


def run(case: Case) -> Summary:
    """Replay it."""
    physics = PHYSICS[case.physics]
    slowing = () if case.slowing is None else (SlowDown(case.slowing, 0, 3.0),)
    scenario = physics.scenario(
        arrival_speed=case.arrival_speed, routers=case.routers, seed=case.seed
    )
    if case.workers:
        scenario = replace(scenario, models=scenario.models[:1] * case.workers)
    if case.slow_workers:
        slow = (_slow(llama_70b()),) * case.slow_workers
        scenario = replace(scenario, models=slow + scenario.models[case.slow_workers :])
    incidents = (*scenario.incidents, *slowing)
    scenario = replace(scenario, incidents=incidents, hides_classes=case.full_only)
    seed = case.seed if case.source in WORKLOADS else 0
    trace = _trace(case.source, case.options, case.half, case.requests, seed)
    trace = spread_arrivals(trace) if case.spread else trace
    if case.slo:
        trace = ObjectiveMix().given_to(trace, Random(OBJECTIVES_SEED))
    return summarize(simulate(trace, scenario, lambda rng: core_of(case, rng)))


def core_of(case: Case, rng: Random) -> RouterCore:
    """The core of the router as it ships, with the settings of a case.

    Rivals may have settings of their own, which are none of the router.
    """
    told: dict[str, float | str] = dict(case.settings)
    selectors: list[Selector] | None = None
    if case.policy in WITH_SETTINGS:
        told, selectors = {}, [WITH_SETTINGS[case.policy](**told)]
    name = f"simulated-{rng.getrandbits(53)}"
    config = configured(RouterConfig, name=name, policy=case.policy, **told)
    return make_core(config, rng, selectors=selectors)


def _slow(model: EngineModel) -> EngineModel:
    names = [name for name in model.__struct_fields__ if name.endswith("_s")]
    return replace(model, **{name: 2 * getattr(model, name) for name in names})


@cache
def _trace(source: str, options: Options, half: int, requests: int | None, seed: int) -> Trace:
    """Return the first requests of a trace or of one of its halves, from second 0 on."""
    if source in WORKLOADS:
        size = {COUNTED.get(source, "requests"): requests or 5_000}
        workload = convert({**dict(options), **size}, WORKLOADS[source])
        return workload.trace(BLOCK_SIZE, Random(seed))
    with Path(source).open("rb") as lines:
        trace = read_mooncake(source, lines)
    middle = len(trace.requests) // 2
    part = (trace.requests, trace.requests[:middle], trace.requests[middle:])[half][:requests]
    begins_s = part[0].arrival_s if half else 0.0
    shifted = [replace(each, arrival_s=each.arrival_s - begins_s) for each in part]
    return replace(trace, requests=shifted)


def number_of_requests(case: Case) -> int:
    """All requests of its source."""
    return len(_trace(case.source, case.options, case.half, None, 0).requests)


class Replay(Struct, frozen=True):
    """A replay, and what came of it, as a line of a journal.

    A run that was cut short goes on where it was. A replay is the same each time, to the last bit,
    as long as the code is: a journal is good for one version of it.
    """

    case: Case
    summary: dict[str, int | float | None]


def read_journal(path: Path) -> dict[Case, Summary]:
    """All that is in it; nothing if there is none."""
    if not path.exists():
        return {}
    replays = json.Decoder(Replay)
    lines = [replays.decode(line) for line in path.read_bytes().splitlines()]
    return {replay.case: _summary(replay) for replay in lines}


def _summary(replay: Replay) -> Summary:
    """Figures that there were none of are null in JSON; those of later versions are missing."""
    known = {name: each for name, each in replay.summary.items() if each is not None}
    values = dict.fromkeys(Summary.__struct_fields__, nan) | known
    return Summary(**values)  # type: ignore[arg-type]


def append_to_journal(path: Path, case: Case, summary: Summary) -> None:
    """Write it down at once."""
    with path.open("ab") as lines:
        lines.write(json.encode(Replay(case, asdict(summary))) + b"\n")
