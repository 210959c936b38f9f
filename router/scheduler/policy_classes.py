"""Policy classes: in which queue a request waits, in what order, and how much may wait there.

A class is one of a matrix, family × bucket of uncached prompt tokens, or stands alone. Callers name
a family or a lone class; the bucket is what we see. The names are those of Dynamo's policy file, so
that one of these can be taken over.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal, TypeAlias

import numpy as np
from msgspec import Meta, Struct

from router.errors import ConfigError
from router.scheduler.busy import Mask
from router.scheduler.terms import FloatArray

QueuePolicy: TypeAlias = Literal["fcfs", "lcfs", "wspt", "deadline"]
Identifier: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
Positive: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 40)]
NotNegative: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 40)]


class PolicyClass(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One queue.

    - `quantum`: uncached tokens that a round grants; shares of classes are as their quanta.
    - A rank is busy above either `prefill_busy_threshold`: tokens, or `…_frac`: of the tokens that
      its engine batches. With neither, nothing waits here.
    - `…_per_worker` limits grow with the workers of the scope. The request that crosses a limit
      still waits; the next is refused.
    - `max_wait_s`: who waits longer is refused; with `deadline`, who is closest to it goes first.
    """

    name: Identifier
    policy_family: Identifier | None = None
    cache_bucket: Identifier | None = None
    queue_policy: QueuePolicy = "fcfs"
    quantum: Positive = 1
    prefill_busy_threshold: NotNegative | None = None
    prefill_busy_threshold_frac: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    request_queue_limit: Positive | None = None
    request_queue_limit_per_worker: Positive | None = None
    raw_isl_token_queue_limit_per_worker: Positive | None = None
    cached_token_queue_limit_per_worker: Positive | None = None
    max_wait_s: Annotated[float, Meta(gt=0, le=86_400)] = 60.0

    @property
    def is_queueing(self) -> bool:
        """Whether anything ever waits here."""
        thresholds = (self.prefill_busy_threshold, self.prefill_busy_threshold_frac)
        return thresholds != (None, None)

    def are_busy(
        self, prefill_tokens: FloatArray, max_batched_tokens: FloatArray, part: float = 1.0
    ) -> Mask:
        """Which of these ranks are busy, at such a part of the threshold."""
        prefill_tokens = prefill_tokens / part
        tokens, fraction = self.prefill_busy_threshold, self.prefill_busy_threshold_frac
        if tokens is not None and fraction is not None:
            return prefill_tokens > np.minimum(tokens, fraction * max_batched_tokens)
        if fraction is not None:
            return prefill_tokens > fraction * max_batched_tokens
        return prefill_tokens > (np.inf if tokens is None else tokens)

    def order(
        self, now_s: float, priority_jump: float, uncached_tokens: int, expires_s: float
    ) -> float:
        """Where a request that comes now stands among those of its tenant; the lowest goes first.

        A jump counts in seconds, except with `wspt` (weighted shortest processing time, Smith's
        rule), where a request weighs 1 + jump.
        """
        match self.queue_policy:
            case "fcfs":
                return now_s - priority_jump
            case "lcfs":
                return -(now_s + priority_jump)
            case "wspt":
                return -(1.0 + priority_jump) / max(1, uncached_tokens)
            case "deadline":
                return expires_s - priority_jump


class UncachedIslBucket(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests with at least so many uncached prompt tokens, and less than the next bucket's."""

    min_tokens: NotNegative
    bucket: Identifier


class PolicyProfile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The classes of a model. Every family has one class for every bucket."""

    default_policy_family: Identifier
    uncached_isl_buckets: list[UncachedIslBucket]
    policy_classes: list[PolicyClass]


class Classes:
    """The classes of a model, and who belongs where."""

    __slots__ = ("_alone", "_default_family", "_floors", "_matrix", "all", "are_queueing")

    def __init__(self, classes: Sequence[PolicyClass]) -> None:
        """Classes that stand alone; the first is everybody's who names no other."""
        self.all = tuple(classes)
        self.are_queueing = any(each.is_queueing for each in self.all)
        self._alone = {each.name: index for index, each in enumerate(self.all)}
        self._floors: list[int] = []
        self._matrix: dict[str, list[int]] = {}
        self._default_family = ""

    @classmethod
    def of(cls, profile: PolicyProfile, key: str = "") -> "Classes":
        """Those of a profile. Raises ConfigError; `key`: where the profile is, in its file."""
        _check_buckets(profile, key)
        _check_classes(profile, key)
        classes = cls(profile.policy_classes)
        classes._floors = [each.min_tokens for each in profile.uncached_isl_buckets]
        classes._matrix = _matrix(profile, key)
        in_matrix = {index for row in classes._matrix.values() for index in row}
        classes._alone = {n: i for n, i in classes._alone.items() if i not in in_matrix}
        _check_families(profile, classes._matrix, classes._alone, key)
        classes._default_family = profile.default_policy_family
        return classes

    def certain(self, asked: str | None) -> int | None:
        """The class of a request, if it does not depend on how much of its prompt is cached."""
        if asked is not None and asked in self._alone:
            return self._alone[asked]
        return None if self._matrix else 0

    def index(self, asked: str | None, uncached_tokens: int) -> int:
        """The class of a request; whoever names no family or lone class is of the default family.
        O(log buckets).
        """
        certain = self.certain(asked)
        if certain is not None:
            return certain
        row = self._matrix.get(asked or "") or self._matrix[self._default_family]
        return row[bisect_right(self._floors, uncached_tokens) - 1]


def single_class(
    threshold_frac: float | None,
    policy: QueuePolicy,
    max_wait_s: float = 60.0,
    request_queue_limit: int | None = None,
) -> Classes:
    """The one class there is without a profile; a threshold of None: nothing waits."""
    only = PolicyClass(
        name="default",
        queue_policy=policy,
        prefill_busy_threshold_frac=threshold_frac,
        max_wait_s=max_wait_s,
        request_queue_limit=request_queue_limit,
    )
    return Classes([only])


def _check_buckets(profile: PolicyProfile, key: str) -> None:
    where = f"{key}uncached_isl_buckets"
    floors = [each.min_tokens for each in profile.uncached_isl_buckets]
    names = [each.bucket for each in profile.uncached_isl_buckets]
    if not floors or floors[0] != 0:
        raise ConfigError(where, "no bucket begins at 0", "the first has min_tokens 0")
    if any(low >= high for low, high in pairwise(floors)):
        raise ConfigError(where, f"min_tokens {floors}", "each above the one before")
    if len(set(names)) < len(names):
        raise ConfigError(where, f"a name twice: {', '.join(names)}", "names of their own")


def _check_classes(profile: PolicyProfile, key: str) -> None:
    seen: set[str] = set()
    for index, each in enumerate(profile.policy_classes):
        where = f"{key}policy_classes[{index}]"
        if each.name in seen:
            raise ConfigError(f"{where}.name", f"{each.name!r} twice", "a name of its own")
        seen.add(each.name)
        if (each.policy_family is None) != (each.cache_bucket is None):
            reason = f"{each.name!r} has only one of policy_family and cache_bucket"
            raise ConfigError(where, reason, "both, or neither")


def _matrix(profile: PolicyProfile, key: str) -> dict[str, list[int]]:
    """Class by family and bucket. Raises ConfigError where a cell is empty, or has two."""
    names = [each.bucket for each in profile.uncached_isl_buckets]
    cells: dict[str, dict[str, int]] = {}
    for index, each in enumerate(profile.policy_classes):
        if each.policy_family is None or each.cache_bucket is None:
            continue
        where = f"{key}policy_classes[{index}].cache_bucket"
        if each.cache_bucket not in names:
            raise ConfigError(where, f"no bucket {each.cache_bucket!r}", ", ".join(names))
        row = cells.setdefault(each.policy_family, {})
        if row.setdefault(each.cache_bucket, index) != index:
            reason = f"two classes for {each.policy_family} × {each.cache_bucket}"
            raise ConfigError(where, reason, "one class for each")
    for family, row in cells.items():
        missing = [name for name in names if name not in row]
        if missing:
            reason = f"family {family!r} has no class for {', '.join(missing)}"
            raise ConfigError(f"{key}policy_classes", reason, "one class for every bucket")
    return {family: [row[name] for name in names] for family, row in cells.items()}


def _check_families(
    profile: PolicyProfile, matrix: dict[str, list[int]], alone: dict[str, int], key: str
) -> None:
    default = profile.default_policy_family
    if default not in matrix:
        where, families = f"{key}default_policy_family", ", ".join(sorted(matrix))
        raise ConfigError(where, f"no family {default!r}", families or "a family of policy_classes")
    for name in alone:
        if name in matrix:
            reason = f"{name!r} is also a family"
            raise ConfigError(f"{key}policy_classes", reason, "a name that no family has")
