"""Log lines: JSON for machines, text on a terminal, and no credentials in either."""

import json
import logging
import subprocess
import sys

import pytest

from router.runtime.process.logs import JsonLines, TextLines
from router.runtime.process.request_ids import ANSWERED, RequestIds

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def record(message, *arguments, error=None):
    info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("router.x", logging.INFO, "x.py", 1, message, arguments, info)


@pytest.fixture
def answered():
    ids = RequestIds("r-1", f"00-{TRACE}-{SPAN}-01")
    token = ANSWERED.set(ids)
    yield ids
    ANSWERED.reset(token)


def test_a_line_is_one_json_object():
    line = JsonLines().format(record("two\nlines of %s", "ünïcode"))
    assert "\n" not in line
    said = json.loads(line)
    assert said.pop("time").endswith("+00:00")
    assert said == {"level": "info", "logger": "router.x", "message": "two\nlines of ünïcode"}


def test_lines_of_a_request_have_its_ids(answered):
    said = json.loads(JsonLines().format(record("hello")))
    assert (said["request_id"], said["trace_id"]) == ("r-1", TRACE)
    assert said["span_id"] == answered.span.span_id != SPAN
    line = TextLines().format(record("hello"))
    assert line.endswith(f"hello request_id=r-1 trace_id={TRACE} span_id={said['span_id']}")


def test_a_traceback_is_a_field_or_follows():
    try:
        raise ValueError("nats://me:secret@bus refused")
    except ValueError as error:
        raised = error
    said = json.loads(JsonLines().format(record("broken", error=raised)))
    assert said["exception"].endswith("ValueError: nats://***@bus refused")
    text = TextLines().format(record("broken", error=raised))
    assert text.splitlines()[1].startswith("Traceback")
    assert "secret" not in text


def test_text_does_not_let_others_write_lines_of_ours():
    line = TextLines().format(record("no worker %s", "x\n2026 ERROR: gone\x1b[2J"))
    assert line.endswith(r"no worker x\x0a2026 ERROR: gone\x1b[2J")


def test_piped_logs_are_json_by_default():
    script = (
        "import logging, sys; from router.runtime.process.logs import log_to_stderr;"
        "log_to_stderr('info', sys.argv[1]); logging.getLogger('a').info('first');"
        "log_to_stderr('warning', sys.argv[1]); logging.getLogger('a').info('second');"
        "logging.getLogger('a').warning('third')"
    )

    def lines(log_format):
        command = [sys.executable, "-c", script, log_format]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        return done.stderr.splitlines()

    assert [json.loads(line)["message"] for line in lines("auto")] == ["first", "third"]
    assert [line.rpartition(": ")[2] for line in lines("text")] == ["first", "third"]
