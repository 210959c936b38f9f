"""Policy classes as an operator writes them: TOML or JSON, with the names of Dynamo's policy file.

    default_policy_family = "standard"
    uncached_isl_buckets = [{min_tokens = 0, bucket = "all"}]

    [[policy_classes]]
    name = "standard_all"
    policy_family = "standard"
    cache_bucket = "all"
    quantum = 4096
    prefill_busy_threshold_frac = 1.0

`models` has profiles of single models, which take the place of the one for all.
"""

import tomllib
from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, MsgspecError, Struct, convert, json

from router.errors import ConfigError
from router.protocol.values import Name
from router.scheduler.policy_classes import (
    Classes,
    Identifier,
    PolicyClass,
    PolicyProfile,
    UncachedIslBucket,
)

KEY = "router_policy_config"
"""What the setting is called; errors begin with it."""


class PolicyFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A profile for every model, if there is one, and profiles of single models."""

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
        """Those of a model: its own, or everybody's."""
        return self._by_model.get(model_name, self._others)


def queue_policies(text: str, single: Classes) -> QueuePolicies:
    """What a policy file says; `single`: the classes of models that it does not speak of.

    Raises ConfigError for text that makes no sense.
    """
    file = decode_policy_file(text) if text else PolicyFile()
    by_model = {
        name: Classes.of(profile, f"{KEY}: models.{name}.") for name, profile in file.models.items()
    }
    everybodys = _everybodys(file)
    others = single if everybodys is None else Classes.of(everybodys, f"{KEY}: ")
    return QueuePolicies(others, by_model)


def decode_policy_file(text: str) -> PolicyFile:
    """JSON where it begins with a brace, else TOML. Raises ConfigError."""
    allowed = "TOML or JSON: policy classes"
    try:
        plain = json.decode(text) if text.lstrip().startswith("{") else tomllib.loads(text)
        return convert(plain, PolicyFile)
    except (MsgspecError, ValueError) as error:
        raise ConfigError(KEY, str(error), allowed) from error


def encode_policy_file(file: PolicyFile) -> str:
    """The file as JSON, in one line."""
    return json.encode(file).decode()


def _everybodys(file: PolicyFile) -> PolicyProfile | None:
    """The profile of all models that have none of their own."""
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
