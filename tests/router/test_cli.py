import os
import signal
import subprocess
import sys

import pytest

import worker_agent.cli
from router.cli import main


@pytest.mark.parametrize(("run", "command"), [(main, "serve"), (worker_agent.cli.main, "tiers")])
def test_help_exits_with_0_and_no_command_with_2(run, command, capsys):
    assert run(["--help"]) == 0
    assert f"\n  {command} " in capsys.readouterr().out
    assert run([""]) == 2
    assert f"\n  {command} " in capsys.readouterr().err


@pytest.mark.parametrize("run", [main, worker_agent.cli.main])
def test_an_unknown_command_is_named(run, capsys):
    assert run(["servee"]) == 2
    said = capsys.readouterr().err
    assert "there is no command 'servee'" in said
    assert said.count("\n") == 1


def test_similar_command_is_suggested(capsys):
    assert main(["servee"]) == 2
    assert "did you mean serve?" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["version", "-v", "-V", "--version"])
def test_version_is_printed(word, capsys):
    assert main([word]) == 0
    assert capsys.readouterr().out.startswith("kv-router ")


def test_help_of_a_command_is_also_that_of_help_with_its_name(capsys):
    with pytest.raises(SystemExit):
        main(["help", "drain"])
    assert capsys.readouterr().out.startswith("usage: kv-router drain [options] ID")
    for asked in (["help"], ["help", "--help"], ["--help", "help"], ["help", "-h"]):
        assert main(asked) == 0
        assert "\n  drain " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "variable"),
    [
        ("serve", "KV_ROUTER_CONFIG"),
        ("forward", "KV_ROUTER_FORWARD_CONFIG"),
        ("epp", "KV_ROUTER_FORWARD_CONFIG"),
    ],
)
def test_help_of_a_command_names_it(capsys, command, variable):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = capsys.readouterr().out
    assert said.startswith(f"usage: kv-router {command} [options]")
    assert variable in said


def test_ctrl_c_before_there_is_anything_to_stop_ends_a_command_without_a_traceback(tmp_path):
    os.mkfifo(trace := tmp_path / "trace")
    # A shell that runs these tests in the background has Ctrl-C ignored by all of them.
    at_terminal = ["env", "--default-signal=INT"]
    command = [*at_terminal, sys.executable, "-m", "router", "simulate", str(trace)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        with trace.open("w"):  # it reads, and waits for us
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        assert "Traceback" not in process.stderr.read()


PROCESSES = [
    (main, "serve"),
    (main, "forward"),
    (main, "epp"),
    (main, "indexer"),
    (main, "up"),
    (main, "doctor"),
    (main, "simulate"),
    (worker_agent.cli.main, "run"),
]
KERNEL_FREE = "sys.exit('numba' in sys.modules or 'uvicorn' in sys.modules)"


def helped(run, capsys, *words):
    with pytest.raises(SystemExit) as end:
        run(list(words))
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("run", "command"), PROCESSES)
def test_help_fits_on_a_page_and_every_setting_has_a_unit_or_choices(
    run, command, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    assert len(helped(run, capsys, command, "--help").splitlines()) <= 80
    try:
        every = helped(run, capsys, command, "--help-all")
    except AssertionError:  # it has few settings, which `--help` shows
        every = helped(run, capsys, command, "--help")
    assert "VALUE" not in every


@pytest.mark.parametrize("command", ["serve", "record"])
def test_help_loads_no_kernel(command):
    code = (
        "import sys; from router.cli import main\n"
        "try: main([sys.argv[1], '--help'])\n"
        f"except SystemExit: {KERNEL_FREE}"
    )
    subprocess.run([sys.executable, "-c", code, command], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("arguments", "variables", "name"),
    [
        (["serve", "--port", "abc"], {}, "--port: 'abc'"),
        (["serve", "--http-port=abc"], {}, "--http-port: 'abc'"),
        (["serve", "--port=1"], {"KV_ROUTER_HTTP_PORT": "abc"}, "KV_ROUTER_HTTP_PORT: 'abc'"),
        (["serve"], {"DYN_ROUTER_QUEUE_THRESHOLD": "x"}, "DYN_ROUTER_QUEUE_THRESHOLD: 'x'"),
        (["serve", "--group-splits", "x"], {}, "--group-splits: 'x'"),
        (["serve"], {"KV_ROUTER_HOST": "0.0.0.0"}, "KV_ROUTER_HOST: '0.0.0.0'"),
        (["serve", "--no-use-kv-events", "--predicted-ttl-s=1"], {}, "--predicted-ttl-s: 1.0"),
        (["epp"], {"KV_ROUTER_FORWARD_ROUTER_URL": "x"}, "KV_ROUTER_FORWARD_ROUTER_URL: 'x'"),
        (["simulate"], {"KV_ROUTER_TRACE": "x"}, "trace: missing"),
    ],
)
def test_a_wrong_setting_is_named_as_it_was_given(arguments, variables, name, capsys, monkeypatch):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"kv-router {arguments[0]}: {name}")


def test_a_wrong_setting_of_a_file_is_named_by_its_key(tmp_path, capsys):
    path = tmp_path / "router.toml"
    path.write_text('http_port = "abc"\n')
    assert main(["serve", "--config", str(path)]) == 2
    assert f"http_port: 'abc' (file {path})" in capsys.readouterr().err
