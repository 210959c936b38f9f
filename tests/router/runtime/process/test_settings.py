"""Flag > environment > file > default; whatever is wrong names its key."""

from enum import Enum
from typing import Annotated, Literal

import pytest
from msgspec import Meta, Struct

from router.config.load import load_router_config
from router.errors import ConfigError
from router.runtime.process.loading import first_pass, load
from router.runtime.process.settings import AGENT_PREFIX, ROUTER_PREFIX, describe, id_of_name


class Mode(Enum):
    EVENTS = "events"
    APPROXIMATE = "approximate"


class Config(Struct, frozen=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1, description="its name")] = "default"
    port: Annotated[int, Meta(ge=0, le=65535, description="its port")] = 80
    fast: Annotated[bool, Meta(description="whether 100% fast")] = False
    ratio: Annotated[float | None, Meta(description="a ratio")] = None
    size: Annotated[int, Meta(le=65535, description="its size")] = 1
    level: Annotated[Literal["quiet", "normal"], Meta(description="how loud")] = "normal"
    mode: Annotated[Mode, Meta(description="fed by what")] = Mode.EVENTS


def loaded(*flags, environment=None, prefix=ROUTER_PREFIX):
    return load(Config, flags, environment or {}, prefix)


def test_defaults():
    assert loaded() == Config()


def test_each_source_beats_the_next(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('name = "file"\nport = 1\nfast = true\n')
    environment = {"KV_ROUTER_CONFIG": str(file), "KV_ROUTER_PORT_NUMBER": "x"}
    del environment["KV_ROUTER_PORT_NUMBER"]
    environment["KV_ROUTER_NAME"] = "environment"
    assert loaded(environment=environment) == Config(name="environment", port=1, fast=True)
    assert loaded("--name", "flag", environment=environment).name == "flag"
    assert loaded("--no-fast", environment=environment).fast is False
    assert loaded("--config", str(file)).name == "file"


def test_converts_strings():
    environment = {"KV_ROUTER_FAST": "true", "KV_ROUTER_RATIO": "0.5"}
    assert loaded("--port", "8080", environment=environment) == Config(
        port=8080, fast=True, ratio=0.5
    )


@pytest.mark.parametrize(
    ("flags", "environment", "key"),
    [
        (["--port", "70000"], {}, "port"),
        (["--port", "http"], {}, "port"),
        (["--name", ""], {}, "name"),
        ([], {"KV_ROUTER_RATIO": "half"}, "ratio"),
        ([], {"KV_ROUTER_SPEED": "1"}, "speed"),
    ],
)
def test_invalid_setting_names_its_key(flags, environment, key):
    with pytest.raises(ConfigError) as caught:
        loaded(*flags, environment=environment)
    assert caught.value.key == key


def test_an_unknown_key_in_a_file_is_an_error(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("speed = 1\n")
    with pytest.raises(ConfigError, match="speed"):
        loaded("--config", str(file))


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("SIZE", "70000", "a whole number <= 65535"),
        ("SIZE", "large", "a whole number"),
        ("NAME", "", "a text of length >= 1"),
        ("RATIO", "half", "a number"),
        ("LEVEL", "loud", "quiet, normal"),
        ("MODE", "none", "events, approximate"),
        ("PROT", "80", "port"),
        ("WEIGHT", "1", "fast, level, mode, name, port, ratio, size"),
    ],
)
def test_invalid_setting_names_the_allowed_values(variable, value, allowed):
    with pytest.raises(ConfigError) as caught:
        loaded(environment={f"KV_ROUTER_{variable}": value})
    assert caught.value.allowed == allowed


def test_long_lists_of_settings_are_cut():
    with pytest.raises(ConfigError) as caught:
        load_router_config([], {"KV_ROUTER_SPEED_OF_LIGHT": "1"})
    assert caught.value.allowed == "what --help-all lists"
    with pytest.raises(ConfigError) as caught:
        load_router_config([], {"KV_ROUTER_HTTP_PROT": "1"})
    assert "http_port" in caught.value.allowed


@pytest.mark.parametrize("content", [None, "not toml ["])
def test_an_unreadable_file_is_an_error(tmp_path, content):
    file = tmp_path / "config.toml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="config"):
        loaded("--config", str(file))


def test_an_unknown_flag_ends_the_process(capsys):
    with pytest.raises(SystemExit):
        loaded("--speed", "1")
    assert "--speed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "environment"),
    [(["--layers", "2"], {}), (["--layers"], {}), ([], {"KV_ROUTER_LAYERS": "2"})],
)
def test_a_setting_of_another_kind_of_the_process_is_refused_in_words(flags, environment):
    with pytest.raises(ConfigError, match=r"(?i)layers: given here .* --engine x") as caught:
        load(Config, flags, environment, ROUTER_PREFIX, {"layers": "with --engine x"})
    assert caught.value.key == "layers"


def test_settings_of_other_kinds_are_not_in_the_help(capsys):
    with pytest.raises(SystemExit):
        load(Config, ["--help"], {}, ROUTER_PREFIX, {"layers": "with --engine x"})
    assert "layers" not in capsys.readouterr().out


def test_a_first_look_at_one_setting_takes_the_sources_in_order(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('name = "file"\nport = 1\n')

    def seen(*flags, **environment):
        return first_pass("name", ["--port", "80", *flags], environment, ROUTER_PREFIX)

    assert seen() is None
    assert seen("--config", str(file)) == seen(KV_ROUTER_CONFIG=str(file)) == "file"
    assert seen("--config", str(file), KV_ROUTER_NAME="environment") == "environment"
    assert seen("--name=flag", KV_ROUTER_NAME="environment") == "flag"
    assert seen("--na", "flag") is None


def test_help_describes_every_field(capsys):
    with pytest.raises(SystemExit):
        loaded("--help")
    printed = capsys.readouterr().out
    assert all(text in printed for _, _, text in describe(Config))


def test_variables_of_other_commands_are_ignored():
    environment = {"KV_ROUTER_AGENT_NUM_BLOCKS": "8", "KV_ROUTER_UP_WORKERS": "2"}
    assert loaded(environment=environment) == Config()
    with pytest.raises(ConfigError, match="KV_ROUTER_AGENT_NUM_BLOCKS"):
        loaded(environment=environment, prefix=AGENT_PREFIX)


@pytest.mark.parametrize(
    "key",
    ["KV_ROUTER_SERVICE_HOST", "KV_ROUTER_SERVICE_PORT_HTTP", "KV_ROUTER_PORT_8092_TCP_ADDR"],
)
def test_kubernetes_service_links_are_not_settings(key):
    assert load_router_config([], {key: "tcp://10.0.0.1:8092", "KV_ROUTER_PORT": "tcp://x"})


def test_ids_of_names_are_stable_and_json_safe():
    assert id_of_name("worker-0") == id_of_name("worker-0") != id_of_name("worker-1")
    assert all(0 <= id_of_name(str(i)) < 2**53 for i in range(1000))
