"""What happens in a run: its processes, their settings, and which faults strike when.

All of it is drawn from one seed, and printable: a run is its scenario.
"""

from random import Random

from msgspec import Struct
from msgspec.structs import replace

from router.protocol.values import Tier, ranks_of
from router.publisher.journal.journal import JournalLimits
from simulation.hybrid import HybridModel, draw_model

RATES = (
    "lose",
    "double",
    "delay",
    "lose_request",
    "lose_ack",
    "late_request",
    "slow_request",
    "drop_delivery",
    "double_delivery",
    "slow_delivery",
)
"""Faults that make something go wrong with some probability, on one link or on all."""

EVENTS = (
    "partition",
    "restart_server",
    "empty_server",
    "shorten_store",
    "fill_store",
    "restart_router",
    "restart_agent",
    "replace_agent",
    "lose_worker",
    "turn_clock_back",
    "poison_log",
    "poison_load",
    "ask_for_checkpoints",
)
"""Faults that happen to one target, once."""


WIRE_RATES = (
    "zmq_lose",
    "zmq_double",
    "zmq_reorder",
    "zmq_delay",
    "replay_lose",
    "replay_cut",
)
"""The same on the wire between an engine and an agent beside it."""

WIRE_EVENTS = ("zmq_disconnect", "restart_engine")
"""Faults of engines and their wires."""


class Fault(Struct, frozen=True):
    """One fault. `target` picks a victim among those there are; `rate` is for `RATES`."""

    kind: str
    at_s: float
    lasts_s: float
    target: int
    rate: float


class Scenario(Struct, frozen=True, kw_only=True):
    """One run."""

    seed: int
    workers: int
    ranks: int
    routers: int
    active_s: float
    device_blocks: int
    host_blocks: int
    think_s: float
    flush_interval_s: float
    journal: JournalLimits
    stays_tight: bool
    is_bridged: bool
    can_replay: bool
    buffer_batches: int
    has_placeholders: bool
    names_anew: bool
    clears_lower_tiers: bool
    keeps_state: bool
    faults: tuple[Fault, ...]
    models: tuple[HybridModel | None, ...] = (None,)

    @property
    def has_hybrids(self):
        return any(self.models)

    def model_of(self, worker_id):
        """The hybrid model of a worker. Returns None if it has full attention only."""
        return self.models[worker_id % len(self.models)]

    def ranks_of(self, worker_id):
        return ranks_of(worker_id, 0, self.ranks)

    def all_ranks(self):
        return [
            rank for worker_id in range(1, self.workers + 1) for rank in self.ranks_of(worker_id)
        ]

    def clears(self):
        """What engines clear: those beside an agent say that they clear, but not what."""
        if not self.is_bridged:
            return (None, Tier.DEVICE)
        return (None,) if self.clears_lower_tiers else (Tier.DEVICE,)

    def first(self, faults):
        """The same, cut to its first faults."""
        return replace(self, faults=self.faults[:faults])

    def without(self, index):
        """The same but for one fault."""
        return replace(self, faults=self.faults[:index] + self.faults[index + 1 :])


def draw(seed):
    """The scenario of a seed."""
    random = Random(seed)
    active_s = random.uniform(1.0, 4.0)
    is_bridged = random.random() < 0.5
    count = random.choice((0, 1, 2, 3, 4, 5, 6, 8))
    faults = [_fault(random, active_s, is_bridged=is_bridged) for _ in range(count)]
    return Scenario(
        seed=seed,
        workers=random.choice((1, 1, 1, 2, 3)),
        ranks=random.choice((1, 1, 1, 2)),
        routers=random.choice((1, 1, 2)),
        active_s=active_s,
        device_blocks=random.choice((12, 24, 48)),
        host_blocks=random.choice((0, 8, 24)),
        think_s=random.choice((0.02, 0.1, 0.1, 0.2, 0.4)),
        flush_interval_s=random.choice((0.02, 0.02, 0.1, 0.5)),
        journal=_journal(random),
        stays_tight=random.random() < 0.5,
        is_bridged=is_bridged,
        can_replay=random.random() < 0.8,
        buffer_batches=random.choice((3, 10, 10_000, 10_000, 10_000)),
        has_placeholders=random.random() < 0.5,
        names_anew=random.random() < 0.5,
        clears_lower_tiers=random.random() < 0.5,
        keeps_state=random.random() < 0.5,
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        models=_models(random) if is_bridged and random.random() < 0.3 else (None,),
    )


def _models(random):
    """One for all workers, or several, among which there may be one that is not hybrid."""
    models = [draw_model(random) for _ in range(random.choice((1, 1, 2)))]
    return (*models, None) if random.random() < 0.2 else tuple(models)


def _fault(random, active_s, *, is_bridged):
    rates, events = RATES, EVENTS
    if is_bridged and random.random() < 0.6:
        rates, events = WIRE_RATES, WIRE_EVENTS
    kind = random.choice(rates if random.random() < 0.4 else events)
    return Fault(
        kind,
        at_s=round(random.uniform(0.1, active_s), 3),
        lasts_s=round(random.choice((0.2, 1.0, 3.0)) * random.random(), 3),
        target=random.randrange(1 << 16),
        rate=random.choice((0.05, 0.3, 1.0)),
    )


def _journal(random):
    """Small enough that messages split, overflow and outgrow what they describe."""
    return JournalLimits(
        event_blocks=random.choice((1, 4, 512)),
        batch_events=random.choice((4, 8_192)),
        batch_blocks=random.choice((8, 65_536)),
        checkpoint_part_blocks=random.choice((4, 16, 98_304)),
        tail_blocks=random.choice((8, 64, 4_096)),
    )
