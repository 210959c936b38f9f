"""Who chooses among the candidates of a decision, and what comes out."""

from random import Random
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from router.placement_errors import NoEndpointsError
from router.scheduler.pick import chances, pick
from router.scheduler.settings import PolicySettings
from router.scheduler.terms import FloatArray, Terms, TermTable

BoolArray: TypeAlias = npt.NDArray[np.bool_]
Names: TypeAlias = tuple[str, ...]


class Choice(Struct, frozen=True, eq=False):
    """The chosen candidate among all of `table`; `costs`: finite, of each, lower is better."""

    index: int
    table: TermTable
    costs: FloatArray
    policy: str

    @property
    def chosen(self) -> Terms:
        """Terms of the chosen candidate."""
        return self.table.terms(self.index)


class Reasons(Struct, frozen=True, eq=False):
    """Why a choice came out as it did: of each candidate, what its cost is the sum of, and how
    likely it was to be chosen by these costs.

    `parts`: a row a candidate, a column a name.
    """

    names: tuple[str, ...]
    parts: FloatArray
    chances: FloatArray

    def of(self, index: int) -> dict[str, float]:
        """A candidate's parts; those that are 0 for everybody say nothing."""
        row = self.parts[index].tolist()
        said = [bool(self.parts[:, i].any()) for i in range(len(self.names))]
        if not any(said):
            return {self.names[0]: row[0]}
        return {name: row[i] for i, name in enumerate(self.names) if said[i]}


class Selector(Protocol):
    """Whoever a core may ask to choose."""

    @property
    def name(self) -> str:
        """What callers and the configuration know it by."""

    def choose(self, table: TermTable, settings: PolicySettings, rng: Random) -> Choice:
        """One of the candidates, of whom there is at least one.

        Nothing but the selector's own state and `rng` may decide beside the arguments: decisions
        are recorded, and have to come out the same again. Raises NoEndpointsError.
        """

    def explain(self, choice: Choice, settings: PolicySettings) -> Reasons:
        """Why it chose so, by the settings it was told."""


class Policy:
    """A selector in three steps: filter, score, pick. A policy overrides those that it needs.

    Once for every decision, on the loop's thread: with 16 candidates in a few microseconds.
    """

    __slots__ = ()
    name: ClassVar[str]

    def filter(self, table: TermTable, settings: PolicySettings) -> BoolArray | None:  # noqa: ARG002
        """Who may be chosen: True for each that may; None: everybody."""
        return None

    def score(self, table: TermTable, settings: PolicySettings) -> FloatArray:
        """The cost of each candidate: finite, contiguous, lower is better."""
        raise NotImplementedError

    def pick(
        self, costs: FloatArray, table: TermTable, settings: PolicySettings, rng: Random
    ) -> int:
        """The index of the chosen candidate: the cheapest, or by the settings' temperature."""
        return pick(costs, settings.router_temperature, rng, *self.tie_breakers(table))

    def tie_breakers(self, table: TermTable) -> tuple[FloatArray, ...]:  # noqa: ARG002
        """By what the lowest is chosen among equal costs, and then among equals in this."""
        return ()

    def parts(self, choice: Choice, settings: PolicySettings) -> tuple[Names, FloatArray]:  # noqa: ARG002
        """What each cost is the sum of: names, and a column for each."""
        return ("cost",), choice.costs.reshape(-1, 1)

    def chances(self, costs: FloatArray, table: TermTable, settings: PolicySettings) -> FloatArray:
        """How likely `pick` is to take each candidate."""
        return chances(costs, settings.router_temperature, *self.tie_breakers(table))

    def choose(self, table: TermTable, settings: PolicySettings, rng: Random) -> Choice:
        """The three steps. Raises NoEndpointsError where the filter leaves nobody."""
        mask = self.filter(table, settings)
        if mask is not None:
            table = kept(table, mask, self.name)
        costs = self.score(table, settings)
        return Choice(self.pick(costs, table, settings, rng), table, costs, self.name)

    def explain(self, choice: Choice, settings: PolicySettings) -> Reasons:
        """See `Reasons`."""
        names, parts = self.parts(choice, settings)
        return Reasons(names, parts, self.chances(choice.costs, choice.table, settings))


def kept(table: TermTable, mask: BoolArray, policy: str) -> TermTable:
    """The candidates that a policy's filter leaves. Raises NoEndpointsError."""
    ranks = [rank for rank, is_kept in zip(table.ranks, mask.tolist(), strict=True) if is_kept]
    if not ranks:
        scope, reason = table.scope, f"policy {policy} filters out every candidate"
        raise NoEndpointsError(scope.model_name, scope.routing_group, reason)
    return replace(table, ranks=ranks, values=table.values[mask])
