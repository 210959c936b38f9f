from argparse import ArgumentTypeError
from typing import Annotated, ClassVar, Literal

import pytest
from msgspec import Struct

from router.runtime.process.command_line import (
    Parser,
    described,
    number_within,
    settings_parser,
)
from router.runtime.process.loading import load
from router.runtime.process.settings import COMMON, DECIDES, Setting, about, settings_of


class Section(Struct, frozen=True, kw_only=True):
    GROUP: ClassVar[str] = "what is kept"

    data_dir: Annotated[str, about("folder; empty: none", COMMON)] = ""
    keep_bytes: Annotated[int, about("size of it; beyond that, an error")] = 1 << 20
    level: Annotated[Literal["low", "high"], about("low: little; high: much", COMMON)] = "low"
    use_kv_events: Annotated[bool, about("100% exact", DECIDES | COMMON)] = True
    http_port: Annotated[int, about("port; 0 takes a free one", COMMON)] = 8092
    place: Annotated[str, about("where", pattern="^[ab]+$", form="a or b, repeated")] = "a"


class Config(Struct, frozen=True, kw_only=True):
    policy: Annotated[str, about("which one decides", unit="POLICY")] = "predictive"
    section: Section = Section()


def parser(**options):
    return settings_parser("kv-router x", Config, "KV_ROUTER_", **options)


def wrong(capsys, *arguments, of=None):
    with pytest.raises(SystemExit) as end:
        (of or parser()).parse_args(arguments)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_similar_option_is_suggested(capsys):
    assert wrong(capsys, "--polisy=x") == (
        "kv-router x: unrecognized arguments: --polisy=x (did you mean --policy?); "
        "all options: kv-router x --help-all\n"
    )
    assert "did you mean" not in wrong(capsys, "--zzz")
    assert "expected one argument" in wrong(capsys, "--policy")


def test_similar_subcommand_is_suggested_in_one_line(capsys):
    commands = Parser(prog="kv-router x")
    questions = commands.add_subparsers(metavar="QUESTION")
    for name in ("workers", "prompt"):
        questions.add_parser(name)
    assert wrong(capsys, "workes", of=commands) == (
        "kv-router x: QUESTION: 'workes' is unknown (allowed: workers)\n"
    )


def test_help_shows_common_settings_in_brief_and_help_all_every_one():
    brief, full = (" ".join(parser(shows_all=every).format_help().split()) for every in (0, 1))
    assert "what is kept: --data-dir FOLDER folder --level low|high" in brief
    assert "low: little; high: much (default: low)" in brief
    assert "--policy" not in brief
    assert "which one decides (default: predictive)" in full
    assert "--keep-bytes BYTES size of it; beyond that, an error (default: 1048576)" in full
    assert "--[no-]use-kv-events 100% exact (default: yes)" in full
    assert "folder; empty: none" in full
    assert "empty: none (default" not in full


def test_port_has_a_short_flag_and_its_settings_name():
    assert "--port PORT" in parser().format_help()
    for flag in ("--port", "--http-port"):
        assert load(Config, [flag, "7"], {}, "KV_ROUTER_").section.http_port == 7


def test_usage_names_positional_arguments():
    simulate = settings_parser("kv-router x", Config, "", positional="policy")
    assert simulate.format_usage() == "usage: kv-router x [options] [POLICY]\n"
    assert load(Config, ["--data-dir", "d", "mine"], {}, "", positional="policy").policy == "mine"
    assert load(Config, [], {}, "", positional="policy") == Config()


@pytest.mark.parametrize(
    ("name", "unit"),
    [("keep_bytes", "BYTES"), ("level", "low|high"), ("use_kv_events", ""), ("policy", "POLICY")],
)
def test_setting_has_a_unit_or_choices(name, unit):
    (setting,) = (each for each in settings_of(Config()) if each.name == name)
    assert setting.unit == unit


def test_marks_are_joined():
    (events,) = (each for each in settings_of(Config()) if each.name == "use_kv_events")
    assert events.has_mark(DECIDES)
    assert events.has_mark(COMMON)
    assert not events.has_mark({"is_secret": True})


def test_pattern_is_described_in_words(capsys):
    with pytest.raises(Exception, match=r"place: 'x' \(flag\) \(allowed: a or b, repeated\)"):
        load(Config, ["--place", "x"], {}, "KV_ROUTER_")


@pytest.mark.parametrize("text", ["0.04", "61", "nan", "inf", "abc", ""])
def test_number_out_of_range_names_what_is_allowed(text):
    assert number_within(0.05, 60)("0.05") == 0.05
    with pytest.raises(ArgumentTypeError) as refused:
        number_within(0.05, 60, "seconds")(text)
    assert str(refused.value) == f"{text!r} (allowed: 0.05 to 60 seconds)"


def test_description_ends_with_the_default():
    assert described(Setting("x", str, 0.5)) == " (default: 0.5)"
