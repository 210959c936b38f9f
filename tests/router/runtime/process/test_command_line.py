import pytest

from router.runtime.process.settings import Parser, add_flag


@pytest.fixture
def parser():
    parser = Parser(prog="kv-router x")
    add_flag(parser, "policy", "predictive", "who chooses")
    add_flag(parser, "data_dir", "", "folder; empty: none")
    add_flag(parser, "use_kv_events", True, "100% exact")
    return parser


def wrong(parser, capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        parser.parse_args(arguments)
    assert end.value.code == 2
    return capsys.readouterr().err


def test_similar_option_is_suggested(parser, capsys):
    assert wrong(parser, capsys, "--polisy=x") == (
        "kv-router x: unrecognized arguments: --polisy=x (did you mean --policy?); "
        "all options: kv-router x --help\n"
    )
    assert "did you mean" not in wrong(parser, capsys, "--zzz")
    assert "expected one argument" in wrong(parser, capsys, "--policy")


def test_defaults_are_shown_where_there_are_some(parser):
    shown = " ".join(parser.format_help().split())
    assert "who chooses (default: predictive)" in shown
    assert "100% exact (default: yes)" in shown
    assert "folder; empty: none" in shown
    assert "empty: none (default" not in shown
