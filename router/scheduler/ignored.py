"""Sentences about settings, fields of overrides and objectives that have no effect.

A policy declares which fields of `PolicySettings` and which `OBJECTIVES` it reads (`uses`): that is
the only source.
"""

from collections.abc import Iterable, Iterator, Sequence

from router.protocol.requests import ConfigOverride, SelectRequest
from router.scheduler.selector import Selector
from router.scheduler.settings import OBJECTIVES

COUNTED = ("track_prefill_tokens", "assume_kv_reuse")
"""Fields of an override that decide what of a prompt counts as load, under any policy."""

PATH = "router_config_override"


def users(field: str, selectors: Iterable[Selector]) -> list[str]:
    """Return the names of the policies that declare to read a field of `PolicySettings`."""
    return [each.name for each in selectors if each.uses is not None and field in each.uses]


def unread(
    fields: Sequence[str], in_force: Sequence[Selector], available: Iterable[Selector]
) -> str | None:
    """Return why none of the policies in force reads any of these fields; None if one may."""
    if any(each.uses is None or not set(fields).isdisjoint(each.uses) for each in in_force):
        return None
    names = _joined([each.name for each in in_force])
    which = f"the policy {names} does" if len(in_force) == 1 else f"the policies {names} do"
    others = users(fields[0], available)
    if not others:
        return f"{which} not use it, and no other one declares to"
    return f"{which} not use it; {_joined(others)} {'does' if len(others) == 1 else 'do'}"


def no_effect(name: str, value: object, reason: str) -> str:
    """Return the sentence about a setting or field without effect."""
    shown = f"{value:g}" if isinstance(value, float) else _shown(value)
    return f"{name} = {shown} has no effect: {reason}"


def by_policy(
    override: ConfigOverride, policy: Selector, available: Iterable[Selector], *, is_booked: bool
) -> dict[str, str]:
    """Return the fields of an override that have no effect under a policy, with sentences.

    `is_booked`: the request is booked, or may be as it was selected.
    """
    reasons = {
        field: reason
        for field, settings in _settings_of(override, is_booked=is_booked)
        if (reason := unread(settings, (policy,), available)) is not None
    }
    weight = override.overlap_score_weight
    if weight is not None and override.prefill_load_scale is not None:
        reasons["prefill_load_scale"] = "overlap_score_weight, its older name, takes precedence"
    if weight == 0 and override.overlap_score_credit is not None:
        reasons["overlap_score_credit"] = "overlap_score_weight = 0 sets it to 0"
    return {field: _sentence(override, field, reason) for field, reason in reasons.items()}


def objectives(
    request: SelectRequest, policy: Selector, available: Iterable[Selector]
) -> dict[str, str]:
    """Return the objectives of a request that a policy does not use, with sentences."""
    given = [name for name in OBJECTIVES if getattr(request, name) is not None]
    reasons = {name: unread((name,), (policy,), available) for name in given}
    return {
        name: no_effect(name, getattr(request, name), f"{reason}; whether it is met is counted")
        for name, reason in reasons.items()
        if reason is not None
    }


def chosen_by_caller(override: ConfigOverride) -> dict[str, str]:
    """Return the fields without effect on a booking of a rank that the caller chose."""
    return _all_but(override, COUNTED, f"no policy chooses; {_ALONE}")


def selected_before(override: ConfigOverride) -> dict[str, str]:
    """Return the fields without effect on a booking of an earlier selection: all of them."""
    return _all_but(override, (), "a selection is booked with the settings it was made with")


def of_loads(override: ConfigOverride) -> dict[str, str]:
    """Return the fields without effect on a forecast of loads."""
    return _all_but(override, COUNTED, f"loads depend on no policy; {_ALONE}")


_ALONE = f"only {' and '.join(COUNTED)} count"


def _all_but(override: ConfigOverride, kept: Sequence[str], reason: str) -> dict[str, str]:
    """Return the given fields of an override except those kept, each with a sentence."""
    return {
        field: _sentence(override, field, reason)
        for field in override.__struct_fields__
        if field not in kept and getattr(override, field) is not None
    }


def _settings_of(
    override: ConfigOverride, *, is_booked: bool
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the given fields that only policies read, and the `PolicySettings` they set."""
    weight = override.overlap_score_weight
    if weight is not None:
        more = ("overlap_score_credit",) if weight == 0 else ()
        yield "overlap_score_weight", ("prefill_load_scale", *more)
    for field in _SAME_NAME:
        if getattr(override, field) is not None:
            yield field, (field,)
    if override.track_prefill_tokens is not None and not is_booked:
        yield "track_prefill_tokens", ("track_prefill_tokens",)


_SAME_NAME = (
    "prefill_load_scale",
    "router_temperature",
    "overlap_score_credit",
    "shared_cache_multiplier",
)


def _sentence(override: ConfigOverride, field: str, reason: str) -> str:
    return no_effect(f"{PATH}.{field}", getattr(override, field), reason)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _joined(names: Sequence[str]) -> str:
    *first, last = [f"`{name}`" for name in names]
    return f"{', '.join(first)} and {last}" if first else last
