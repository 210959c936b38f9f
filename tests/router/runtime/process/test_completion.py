"""Completion scripts: they are ones of their shells, and know commands, options and choices."""

import subprocess

import pytest

import worker_agent.cli
from router.cli import main

PROGRAMS = [(main, "_kv_router"), (worker_agent.cli.main, "_kv_worker_agent")]


def script(run, shell, capsys):
    assert run(["completion", shell]) == 0
    return capsys.readouterr().out


def completed(text, function, *words):
    """What bash offers for the last of these words."""
    line = " ".join(f"'{word}'" for word in words)
    asked = (
        f"{text}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}\n"
        f'COMPREPLY=(); {function}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", asked], check=True, capture_output=True, text=True)
    return done.stdout.split()


@pytest.mark.parametrize(("run", "function"), PROGRAMS)
def test_bash_script_parses(run, function, capsys):
    text = script(run, "bash", capsys)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert f"complete -o default -F {function} " in text


def test_bash_offers_commands_options_and_choices(capsys):
    text = script(main, "bash", capsys)
    assert completed(text, "_kv_router", "kv-router", "un") == ["unregister", "uncordon"]
    assert completed(text, "_kv_router", "kv-router", "serve", "--nats-u") == [
        "--nats-user",
        "--nats-url",
    ]
    assert completed(text, "_kv_router", "kv-router", "serve", "--log-level", "w") == ["warning"]
    assert completed(text, "_kv_router", "kv-router", "serve", "--config", "") == []
    assert completed(text, "_kv_router", "kv-router", "inspect", "work") == ["workers", "worker"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
@pytest.mark.parametrize("run", [each for each, _ in PROGRAMS])
def test_other_shells_get_every_command_and_balanced_quotes(run, shell, capsys):
    text = script(run, shell, capsys)
    assert "log-level" in text
    for line in text.splitlines():
        assert line.replace("'\"'\"'", "").count("'") % 2 == 0, line


def test_unknown_shell_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        main(["completion", "tcsh"])
    assert end.value.code == 2
    assert "'tcsh' is unknown" in capsys.readouterr().err
