"""Settings under other names, and the configuration that comes of it, shown."""

import tomllib
from typing import Annotated

import pytest
from msgspec import Meta, Struct

from router.errors import ConfigError
from router.runtime.process.aliases import Alias
from router.runtime.process.loading import load, load_with_sources
from router.runtime.process.settings import SettingView, as_toml, effective


class Config(Struct, frozen=True, kw_only=True):
    ttl_s: Annotated[float, Meta(gt=0, description="a time")] = 120.0
    fast: Annotated[bool, Meta(description="whether fast")] = True
    url: Annotated[str, Meta(description="where")] = ""
    limit: Annotated[int | None, Meta(description="at most")] = None


ALIASES = (
    Alias("ttl_secs", "OTHER_TTL_SECS", "ttl_s"),
    Alias("fast", "OTHER_FAST"),
    Alias("go_fast", "OTHER_GO_FAST", "fast"),
    Alias("mode", "OTHER_MODE", meaning=lambda value: {"fast": value == "kv", "limit": 7}),
)


def loaded(*flags, **environment):
    return load_with_sources(Config, flags, environment, "KV_ROUTER_", aliases=ALIASES)


def test_each_source_knows_a_setting_by_every_name(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("ttl_secs = 1\n")
    for found, source in [
        (loaded("--config", str(file)), f"file {file}: ttl_secs"),
        (loaded(OTHER_TTL_SECS="1"), "environment: OTHER_TTL_SECS"),
        (loaded("--ttl-secs", "1"), "flag: --ttl-secs"),
    ]:
        assert found.config == Config(ttl_s=1.0)
        assert found.sources == {"ttl_s": source}


def test_a_flag_beats_a_variable_whatever_they_call_it():
    assert loaded("--ttl-secs", "1", KV_ROUTER_TTL_S="2").config.ttl_s == 1.0
    assert loaded("--no-go-fast", OTHER_FAST="true").config.fast is False


def test_a_value_may_stand_for_several_settings():
    assert loaded(OTHER_MODE="random").config == Config(fast=False, limit=7)


def test_two_names_in_one_source_have_to_agree():
    assert loaded(KV_ROUTER_TTL_S="2", OTHER_TTL_SECS="2.0").config.ttl_s == 2.0
    with pytest.raises(ConfigError, match="KV_ROUTER_TTL_S is") as caught:
        loaded(KV_ROUTER_TTL_S="2", OTHER_TTL_SECS="3")
    assert caught.value.key == "OTHER_TTL_SECS"


def test_limits_are_those_of_the_setting():
    with pytest.raises(ConfigError) as caught:
        loaded(OTHER_TTL_SECS="-1")
    assert caught.value.key == "ttl_s"


def test_effective_settings_name_their_sources():
    found = loaded("--url", "nats://me:secret@h:1,nats://h:2", OTHER_TTL_SECS="5")
    shown = effective(found.config, found.sources)
    assert shown == {
        "ttl_s": SettingView(5.0, "environment: OTHER_TTL_SECS"),
        "fast": SettingView(True, "default"),
        "url": SettingView("nats://***@h:1,nats://h:2", "flag: --url"),
        "limit": SettingView(None, "default"),
    }
    assert effective(Config(limit=3), {})["limit"] == SettingView(3, "set")


def test_shown_settings_are_a_configuration_file(tmp_path, capsys):
    file = tmp_path / "config.toml"
    found = loaded("--ttl-secs", "3", "--no-fast", "--limit", "9", "--url", 'a "b"')
    file.write_text(as_toml(effective(found.config, found.sources)))
    assert tomllib.loads(file.read_text())["limit"] == 9
    assert loaded("--config", str(file)).config == found.config
    with pytest.raises(SystemExit) as ended:
        load(Config, ["--show-config", "--limit", "3"], {}, "KV_ROUTER_")
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "limit = 3  # flag: --limit\n" in printed
    assert "ttl_s = 120.0  # default\n" in printed
