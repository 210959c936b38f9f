"""Policies of third parties: tried once at start-up, and checked at every decision.

A policy that violates its contract fails only the decision at hand, with an error message.
"""

import re
from collections.abc import Callable
from random import Random
from typing import NoReturn, TypeVar

import numpy as np
from msgspec.structs import replace

from router.errors import ConfigError, KvRouterError
from router.protocol.values import Rank, Scope
from router.scheduler.errors import PolicyFailedError
from router.scheduler.selector import BoolArray, Choice, Policy, Reasons, kept
from router.scheduler.settings import PolicySettings
from router.scheduler.terms import COLUMNS, TAINT_FACTOR, FloatArray, TermTable
from router.sequence.rank_table import BLOCK_SIZE

T = TypeVar("T")

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class CustomPolicy:
    """A selector around a third party's `Policy`, with each step checked. O(candidates)."""

    __slots__ = ("_policy", "name", "uses")

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name: str = policy.name
        self.uses = policy.uses

    def choose(self, table: TermTable, settings: PolicySettings, rng: Random) -> Choice:
        """Run the policy's three steps. Raises NoEndpointsError, PolicyFailedError."""
        mask = self._step("filter", lambda: self._policy.filter(table, settings))
        if mask is not None:
            self._check_mask(mask, len(table))
            table = kept(table, mask, self.name)
        costs = self._step("score", lambda: self._policy.score(table, settings))
        self._check_costs(costs, len(table))
        index = self._step("pick", lambda: self._policy.pick(costs, table, settings, rng))
        if type(index) is not int or not 0 <= index < len(table):
            self._fail("pick", f"returned {index!r}, not an int from 0 to {len(table) - 1}")
        return Choice(index, table, costs, self.name)

    def explain(self, choice: Choice, settings: PolicySettings) -> Reasons:
        """Return the reasons that the policy gives.

        Chances are NaN if it overrides `pick` without `chances`.
        """
        reasons = self._step("explain", lambda: self._policy.explain(choice, settings))
        count = len(choice.table)
        if reasons.parts.shape != (count, len(reasons.names)) or reasons.chances.shape != (count,):
            self._fail("explain", f"returned parts of shape {reasons.parts.shape}")
        own = type(self._policy)
        if own.pick is not Policy.pick and own.chances is Policy.chances:
            return replace(reasons, chances=np.full(count, np.nan))
        return reasons

    def _step(self, step: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except KvRouterError:
            raise
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything
            self._fail(step, f"raised {type(error).__name__}: {error}")

    def _check_mask(self, mask: BoolArray, count: int) -> None:
        if getattr(mask, "dtype", None) != np.bool_ or mask.shape != (count,):
            self._fail("filter", f"returned {_kind(mask)}, not None or {count} bools in an array")

    def _check_costs(self, costs: FloatArray, count: int) -> None:
        is_array = getattr(costs, "dtype", None) == np.float64 and costs.shape == (count,)
        if not (is_array and costs.flags.c_contiguous):
            wanted = f"not {count} contiguous float64 in an array"
            self._fail("score", f"returned {_kind(costs)}, {wanted}")
        if not np.isfinite(costs).all():
            self._fail("score", f"returned costs that are not finite: {costs.tolist()}")

    def _fail(self, step: str, reason: str) -> NoReturn:
        raise PolicyFailedError(self.name, step, reason)


def checked_policy(origin: str, made: object) -> CustomPolicy:
    """Return a policy as a selector, after a trial choice between two idle candidates.

    `origin` names the source of the policy in errors. Raises ConfigError if it violates the
    contract of `Policy`.
    """
    if not isinstance(made, Policy):
        raise ConfigError(origin, f"makes {_kind(made)}", "an instance of a subclass of Policy")
    if type(made).choose is not Policy.choose:
        raise ConfigError(origin, "overrides choose", "filter, score and pick")
    name = getattr(made, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(origin, f"its name is {name!r}", f"a string like {_NAME.pattern}")
    _check_uses(origin, made.uses)
    policy = CustomPolicy(made)
    try:
        policy.choose(_trial_table(), PolicySettings(), Random(0))
    except KvRouterError as error:
        raise ConfigError(origin, str(error), "one of two idle candidates chosen") from error
    return policy


def _check_uses(origin: str, uses: object) -> None:
    """Refuse a declaration of settings that do not exist. Raises ConfigError."""
    known = PolicySettings.__struct_fields__
    is_valid = uses is None or (isinstance(uses, tuple) and all(each in known for each in uses))
    if not is_valid:
        raise ConfigError(origin, f"uses {uses!r}", f"None, or a tuple of {', '.join(known)}")


def _trial_table() -> TermTable:
    values = np.zeros((2, COLUMNS))
    values[:, BLOCK_SIZE] = 16.0
    values[:, TAINT_FACTOR] = 1.0
    return TermTable(Scope(), (Rank(1, 0), Rank(2, 0)), values, 100, None, 0.0)


def _kind(found: object) -> str:
    if isinstance(found, np.ndarray):
        return f"an array of {found.dtype}, shape {found.shape}"
    return f"a {type(found).__name__}"
