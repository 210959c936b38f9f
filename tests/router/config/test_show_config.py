"""What `--show-config` prints, as a file for `--config`."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from router.config.indexer import IndexerConfig
from router.config.router import RouterConfig
from router.forward.config import ForwardConfig
from router.runtime.process.loading import load
from router.runtime.process.redaction import SECRET, redact
from router.runtime.process.settings import (
    AGENT_PREFIX,
    FORWARD_PREFIX,
    INDEXER_PREFIX,
    ROUTER_PREFIX,
    as_toml,
    configured,
    effective,
    settings_of,
)
from router.tools.recordings.record import RecordConfig
from worker_agent.config.bridge import BridgeConfig
from worker_agent.config.reference import ReferenceConfig

COMMANDS = {
    RouterConfig: ROUTER_PREFIX,
    RecordConfig: ROUTER_PREFIX,
    IndexerConfig: INDEXER_PREFIX,
    ForwardConfig: FORWARD_PREFIX,
    ReferenceConfig: AGENT_PREFIX,
    BridgeConfig: AGENT_PREFIX,
}


def integers(kind):
    least = -(2**63) if kind.ge is None else kind.ge
    return st.integers(least, 2**63 - 1 if kind.le is None else kind.le)


def floats(kind):
    least, most = kind.gt if kind.ge is None else kind.ge, kind.le
    limits = {"exclude_min": kind.gt is not None, "allow_nan": False}
    return st.floats(None if least is None else float(least), most and float(most), **limits)


def texts(kind):
    if kind.pattern is not None:
        return st.from_regex(kind.pattern)
    return st.text(min_size=kind.min_length or 0, max_size=min(kind.max_length or 20, 20))


STRATEGIES = {
    inspect.Metadata: lambda kind: values(kind.type),
    inspect.BoolType: lambda _: st.booleans(),
    inspect.IntType: integers,
    inspect.FloatType: floats,
    inspect.StrType: lambda kind: texts(kind).filter(lambda text: redact(text) == text),
    inspect.LiteralType: lambda kind: st.sampled_from(kind.values),
    inspect.ListType: lambda kind: st.lists(values(kind.item_type), max_size=3),
    inspect.DictType: lambda kind: st.dictionaries(values(kind.key_type), values(kind.value_type)),
    inspect.UnionType: lambda kind: st.one_of(
        values(each) for each in kind.types if not isinstance(each, inspect.NoneType)
    ),
}


def values(kind):
    """Valid values of a type, except None."""
    return STRATEGIES[type(kind)](kind)


def settings_for(config_type):
    """Some settings of a configuration, without secrets: they are not shown."""
    named = {
        each.name: values(inspect.type_info(each.type))
        for each in settings_of(config_type())
        if not each.has_mark(SECRET)
    }
    return st.fixed_dictionaries({}, optional=named)


def test_setting_names_are_unique():
    for config_type in COMMANDS:
        names = [each.name for each in settings_of(config_type())]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("config_type", COMMANDS)
@settings(max_examples=20)
@given(data=st.data())
def test_shown_configuration_is_a_file_with_the_same_settings(config_type, data, tmp_path_factory):
    config = configured(config_type, **data.draw(settings_for(config_type)))
    file = tmp_path_factory.getbasetemp() / f"{config_type.__name__}.toml"
    file.write_text(as_toml(effective(config, {})))
    assert load(config_type, ["--config", str(file)], {}, COMMANDS[config_type]) == config
