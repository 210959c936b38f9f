"""Policy classes: the queue of a request, its order there, and the limits of the queue.

A class is a cell of a matrix, family × bucket of uncached prompt tokens, or stands alone. Callers
name a family or a lone class; the router determines the bucket. The names are those of Dynamo's
policy file, so that such a file is easily converted.
"""

import tomllib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import Annotated, TypeAlias

from msgspec import Meta, MsgspecError, Struct, convert, json

from router.errors import ConfigError
from router.protocol.requests import Milliseconds, Unmet
from router.protocol.values import Name
from router.scheduler._busy_kernel import is_any_free
from router.scheduler.busy import Slots
from router.scheduler.settings import QueuePolicy
from router.scheduler.terms import FloatArray

Identifier: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
Positive: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 40)]
NotNegative: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 40)]


class PolicyClass(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy class: one queue, with its order, share and limits.

    - `quantum`: uncached tokens that a round grants; shares of classes are as their quanta.
    - A rank is busy above either `prefill_busy_threshold`, in tokens, or `…_frac`, a fraction of
      the tokens that its engine batches. Without both, no request waits here.
    - `…_per_worker` limits grow with the workers of the scope. The request that crosses a limit
      still waits; the next is refused.
    - `max_wait_s`: a request that waits longer is refused; with `deadline`, the request closest to
      its limit goes first.
    - `slo_ttft_ms`, `slo_tpot_ms`: objectives of requests without their own. `slo_unmet`: whether
      a request is refused, or placed nevertheless, if no rank is predicted to meet its objectives;
      by default as the setting of that name.
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
    slo_ttft_ms: Milliseconds | None = None
    slo_tpot_ms: Milliseconds | None = None
    slo_unmet: Unmet | None = None

    @property
    def has_objectives(self) -> bool:
        """True if requests without their own have objectives here."""
        return self.slo_ttft_ms is not None or self.slo_tpot_ms is not None

    @property
    def is_queueing(self) -> bool:
        """True if requests can wait here."""
        thresholds = (self.prefill_busy_threshold, self.prefill_busy_threshold_frac)
        return thresholds != (None, None)

    def has_room(self, values: FloatArray, slots: Slots, part: float = 1.0) -> bool:
        """Return whether one of these slots' ranks is not busy, at this fraction of the threshold.

        `values`: the rank table, or rows of it.
        """
        tokens, steps = self.prefill_busy_threshold, self.prefill_busy_threshold_frac
        most_tokens, most_steps = (inf if each is None else each for each in (tokens, steps))
        return is_any_free(values, slots, most_tokens, most_steps, part)

    def order(
        self, now_s: float, priority_jump: float, uncached_tokens: int, expires_s: float
    ) -> float:
        """Return the sort key of a request that arrives now, among its tenant's; lowest first.

        A jump is in seconds, except with `wspt` (weighted shortest processing time, Smith's rule),
        where a request weighs 1 + jump.
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
    """Requests with at least `min_tokens` uncached prompt tokens, below the next bucket's."""

    min_tokens: NotNegative
    bucket: Identifier


class PolicyProfile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The classes of a model. Every family has one class for every bucket."""

    default_policy_family: Identifier
    uncached_isl_buckets: list[UncachedIslBucket]
    policy_classes: list[PolicyClass]


class Classes:
    """The classes of a model, and the assignment of requests to them."""

    __slots__ = (
        "_alone",
        "_default_family",
        "_floors",
        "_matrix",
        "all",
        "are_queueing",
        "have_objectives",
    )

    def __init__(self, classes: Sequence[PolicyClass]) -> None:
        """Store classes that stand alone; the first is the default."""
        self.all = tuple(classes)
        self.are_queueing = any(each.is_queueing for each in self.all)
        self.have_objectives = any(each.has_objectives for each in self.all)
        self._alone = {each.name: index for index, each in enumerate(self.all)}
        self._floors: list[int] = []
        self._matrix: dict[str, list[int]] = {}
        self._default_family = ""

    @classmethod
    def of(cls, profile: PolicyProfile, key: str = "") -> "Classes":
        """Return the classes of a profile. Raises ConfigError; `key`: the profile's path."""
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
        """Return the index of a request's class; None if it depends on the cached tokens."""
        if asked is not None and asked in self._alone:
            return self._alone[asked]
        return None if self._matrix else 0

    def index(self, asked: str | None, uncached_tokens: int) -> int:
        """Return the index of a request's class. O(log buckets).

        The default family applies to requests that name no known family or lone class.
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
    slo_ttft_ms: float | None = None,
    slo_tpot_ms: float | None = None,
) -> Classes:
    """Return the one class without a profile; a threshold of None disables waiting."""
    only = PolicyClass(
        name="default",
        queue_policy=policy,
        prefill_busy_threshold_frac=threshold_frac,
        max_wait_s=max_wait_s,
        request_queue_limit=request_queue_limit,
        slo_ttft_ms=slo_ttft_ms,
        slo_tpot_ms=slo_tpot_ms,
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
    """Return class indexes by family and bucket. Raises ConfigError unless each cell has one."""
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


KEY = "router_policy_config"
"""Name of the setting; error messages begin with it."""


class PolicyFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The profile for all models, if present, and profiles of single models."""

    default_policy_family: Identifier | None = None
    uncached_isl_buckets: list[UncachedIslBucket] | None = None
    policy_classes: Annotated[list[PolicyClass], Meta(max_length=256)] | None = None
    models: Annotated[dict[Name, PolicyProfile], Meta(max_length=1024)] = {}


class QueuePolicies:
    """The classes of every model."""

    __slots__ = ("_by_model", "_others")

    def __init__(self, others: Classes, by_model: Mapping[str, Classes]) -> None:
        self._others = others
        self._by_model = by_model

    def classes(self, model_name: str) -> Classes:
        """Return the classes of a model: its own, or the general ones."""
        return self._by_model.get(model_name, self._others)

    @property
    def are_queueing(self) -> bool:
        """True if requests of some models may wait."""
        return any(each.are_queueing for each in (self._others, *self._by_model.values()))

    @property
    def have_objectives(self) -> bool:
        """True if requests of some models have objectives without naming them."""
        return any(each.have_objectives for each in (self._others, *self._by_model.values()))


def queue_policies(text: str, single: Classes) -> QueuePolicies:
    """Decode a policy file; `single`: the classes of models without a profile.

    Raises ConfigError if the text is invalid.
    """
    file = decode_policy_file(text) if text else PolicyFile()
    by_model = {
        name: Classes.of(profile, f"{KEY}: models.{name}.") for name, profile in file.models.items()
    }
    everybodys = _default_profile(file)
    others = single if everybodys is None else Classes.of(everybodys, f"{KEY}: ")
    return QueuePolicies(others, by_model)


def decode_policy_file(text: str) -> PolicyFile:
    """Decode JSON if the text begins with a brace, else TOML. Raises ConfigError."""
    allowed = "TOML or JSON: policy classes"
    try:
        plain = json.decode(text) if text.lstrip().startswith("{") else tomllib.loads(text)
        return convert(plain, PolicyFile)
    except (MsgspecError, ValueError) as error:
        raise ConfigError(KEY, str(error), allowed) from error


def encode_policy_file(file: PolicyFile) -> str:
    """Encode the file as JSON, in one line."""
    return json.encode(file).decode()


def _default_profile(file: PolicyFile) -> PolicyProfile | None:
    """Return the profile of all models without their own; None if the file has none."""
    fields = {
        "default_policy_family": file.default_policy_family,
        "uncached_isl_buckets": file.uncached_isl_buckets,
        "policy_classes": file.policy_classes,
    }
    missing = [name for name, value in fields.items() if value is None]
    if len(missing) == len(fields):
        return None
    if missing:
        others = ", ".join(name for name in fields if name not in missing)
        raise ConfigError(f"{KEY}: {missing[0]}", f"missing beside {others}", "all three, or none")
    assert file.default_policy_family is not None
    return PolicyProfile(
        default_policy_family=file.default_policy_family,
        uncached_isl_buckets=file.uncached_isl_buckets or [],
        policy_classes=file.policy_classes or [],
    )
