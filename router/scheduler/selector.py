"""The choice of a candidate by cost."""

from collections.abc import Sequence
from itertools import compress
from random import Random
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from router.scheduler._pick_kernel import cheapest, drawn, keys_of_equals, nth_equal, softmax
from router.scheduler.errors import NoEndpointsError
from router.scheduler.settings import PolicySettings
from router.scheduler.terms import FloatArray, Terms, TermTable


def pick(costs: FloatArray, temperature: float, rng: Random, *tie_breakers: FloatArray) -> int:
    """Return the index of the chosen candidate; costs are finite, and there is at least one.

    At temperature 0 the cheapest; ties are broken by the lowest value of the first tie breaker,
    then of the next, and finally at random. Above 0 a random draw with
    p ∝ exp(−cost / ((max − min) · temperature)), uniform if all costs are equal.
    """
    if temperature > 0:
        return drawn(costs, temperature, rng.random())
    first, ties = cheapest(costs)
    if tie_breakers and ties > 1:
        kept = np.empty(len(costs))
        keys_of_equals(costs, first, np.ascontiguousarray(tie_breakers[0]), kept)
        return pick(kept, 0.0, rng, *tie_breakers[1:])
    return draw_equal(costs, first, ties, rng)


def draw_equal(costs: FloatArray, first: int, ties: int, rng: Random) -> int:
    """Return one of `ties` candidates with the same cost as the first of them, at random."""
    return nth_equal(costs, first, rng.randrange(ties)) if ties > 1 else first


def chances(costs: FloatArray, temperature: float, *tie_breakers: FloatArray) -> FloatArray:
    """Return the probability that `pick` chooses each candidate, by the same rules."""
    if temperature > 0:
        drawn_from = np.empty(len(costs))
        softmax(np.ascontiguousarray(costs), temperature, drawn_from)
        return drawn_from
    best = costs == costs.min()
    for keys in tie_breakers:
        best &= keys == keys[best].min()
    likely: FloatArray = best / best.sum()
    return likely


BoolArray: TypeAlias = npt.NDArray[np.bool_]
Names: TypeAlias = tuple[str, ...]


class Choice(Struct, frozen=True, eq=False, gc=False):
    """The chosen candidate of `table`, and the costs of all: finite, lower is better."""

    index: int
    table: TermTable
    costs: FloatArray
    policy: str

    @property
    def chosen(self) -> Terms:
        """The terms of the chosen candidate."""
        return self.table.terms(self.index)


class Reasons(Struct, frozen=True, eq=False):
    """The explanation of a choice: the parts of each candidate's cost, and its probability.

    `parts`: one row per candidate, one column per name.
    """

    names: tuple[str, ...]
    parts: FloatArray
    chances: FloatArray

    def named(self, which: Sequence[int]) -> list[dict[str, float]]:
        """Return the parts of these candidates, without those that are 0 for all candidates."""
        used: list[bool] = np.asarray(self.parts.any(axis=0)).tolist()
        used[0] |= not any(used)
        names, rows = tuple(compress(self.names, used)), self.parts[which].tolist()
        return [dict(zip(names, compress(row, used), strict=True)) for row in rows]


class Selector(Protocol):
    """A policy, as the core uses it."""

    @property
    def name(self) -> str:
        """The name for callers and the configuration."""

    @property
    def uses(self) -> tuple[str, ...] | None:
        """The fields of `PolicySettings` that it reads; None: any."""

    def choose(self, table: TermTable, settings: PolicySettings, rng: Random) -> Choice:
        """Choose one of the candidates, of which there is at least one.

        The result may depend only on the arguments, the selector's own state and `rng`: decisions
        are recorded and must be reproducible. Raises NoEndpointsError.
        """

    def explain(self, choice: Choice, settings: PolicySettings) -> Reasons:
        """Return the reasons of a choice, under the settings it was made with."""


class Policy:
    """A selector in three steps: filter, score, pick. A policy overrides those that it needs.

    Runs once for every decision, on the event loop's thread: with 16 candidates in a few
    microseconds. `uses`: the fields of `PolicySettings` that it reads, so that callers and
    operators are warned of those without effect; None, unless it declares them: any.
    """

    __slots__ = ()
    name: ClassVar[str]
    uses: ClassVar[tuple[str, ...] | None] = None

    def filter(self, table: TermTable, settings: PolicySettings) -> BoolArray | None:  # noqa: ARG002
        """Return a mask of the candidates that may be chosen; None: all."""
        return None

    def score(self, table: TermTable, settings: PolicySettings) -> FloatArray:
        """Return the cost of each candidate: finite, contiguous, lower is better."""
        raise NotImplementedError

    def pick(
        self, costs: FloatArray, table: TermTable, settings: PolicySettings, rng: Random
    ) -> int:
        """Return the index of the chosen candidate: the cheapest, or by the set temperature."""
        return pick(costs, settings.router_temperature, rng, *self.tie_breakers(table))

    def tie_breakers(self, table: TermTable) -> tuple[FloatArray, ...]:  # noqa: ARG002
        """Return values that decide between equal costs: the lowest of the first, then the next."""
        return ()

    def parts(self, choice: Choice, settings: PolicySettings) -> tuple[Names, FloatArray]:  # noqa: ARG002
        """Return the summands of each cost: names, and a column for each."""
        return ("cost",), choice.costs.reshape(-1, 1)

    def chances(self, costs: FloatArray, table: TermTable, settings: PolicySettings) -> FloatArray:
        """Return the probability that `pick` chooses each candidate."""
        return chances(costs, settings.router_temperature, *self.tie_breakers(table))

    def choose(self, table: TermTable, settings: PolicySettings, rng: Random) -> Choice:
        """Filter, score and pick. Raises NoEndpointsError if the filter leaves no candidate."""
        mask = self.filter(table, settings)
        if mask is not None:
            table = kept(table, mask, self.name)
        costs = self.score(table, settings)
        return Choice(self.pick(costs, table, settings, rng), table, costs, self.name)

    def explain(self, choice: Choice, settings: PolicySettings) -> Reasons:
        """Return the `Reasons` of a choice."""
        names, parts = self.parts(choice, settings)
        return Reasons(names, parts, self.chances(choice.costs, choice.table, settings))


def kept(table: TermTable, mask: BoolArray, policy: str) -> TermTable:
    """Return the candidates that a policy's filter leaves. Raises NoEndpointsError."""
    ranks = [rank for rank, is_kept in zip(table.ranks, mask.tolist(), strict=True) if is_kept]
    if not ranks:
        scope, reason = table.scope, f"policy {policy} filters out every candidate"
        raise NoEndpointsError(scope.model_name, scope.routing_group, reason)
    slots = table.slots[mask] if len(table.slots) else table.slots
    return replace(table, ranks=ranks, values=table.values[mask], slots=slots)
