"""Commands that only a larger machine can run say what is accepted: options, routes, targets."""

import re
import shlex
from pathlib import Path

import pytest

from router.api.http.index_api import INDEX_ROUTES
from router.api.http.routes import ROUTES
from router.config.indexer import load_indexer
from router.config.load import load_router_config
from router.errors import ConfigError
from router.forward.config import load_forward
from router.runtime.process.loading import as_given
from router.runtime.security.route_scopes import ROUTE_SCOPES
from router.tools.up.config import load_up_config
from support.values.pages import commands
from worker_agent.config.reference import load_agent_config

ROOT = Path(__file__).parents[2]
PARTS = [
    path
    for part in ("deploy", "router", "worker_agent")
    for path in (ROOT / part).rglob("README.md")
]
AT_ROOT = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES = [*AT_ROOT, *sorted(PARTS), *sorted((ROOT / "docs").glob("*.md"))]
EVERY = [
    pytest.param(page.read_text(), command.text, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, command in enumerate(commands(page.read_text()))
]
LOADERS = {
    "kv-router serve": load_router_config,
    "kv-router forward": load_forward,
    "kv-router indexer": load_indexer,
    "kv-router up": load_up_config,
    "kv-worker-agent run": load_agent_config,
}
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
PATHS = {route.path for route in (*ROUTES, *INDEX_ROUTES)}
PATHS |= {key.split(" ", 1)[1] for key in ROUTE_SCOPES}


@pytest.mark.parametrize(("page", "text"), EVERY)
def test_a_command_line_is_one(page, text):
    for command in re.split(r"(?<=\s)&(?=\s|$)|(?<!\\)\||;", text):
        for words, load in LOADERS.items():
            if found := re.match(rf"\s*(?:(\w+)=(\S+) )?{words} ?(.*)", command, re.S):
                check(load, found, page)
        for target in re.findall(r"^make ([\w-]+)", command.strip()):
            assert target in TARGETS
        for path in re.findall(r"(?:localhost|127\.0\.0\.1):\d+(/[\w/:]*)", command):
            if "curl" in command or "post" in command:
                assert any(fits(path, known) for known in PATHS), path


def check(load, found, page):
    """It loads, or the page shows that it is refused."""
    key, value, rest = found.groups()
    arguments = shlex.split(re.sub(r"\s+#.*|…|>.*", "", rest.replace("\\\n", " ")))
    kept = [each for each in arguments if each != "--show-config"]
    name = kept.index("--name") + 1 if "--name" in kept else None
    if name is not None and kept[name].startswith("$"):
        kept[name] = "pod-0"
    if error := refusal(load, kept, {key: value} if key else {}):
        said = re.sub(r"\s", "", page)
        text = str(error)
        if isinstance(error, ConfigError):
            text = as_given(error, kept, {}, "")
        assert is_away(error) or re.sub(r"\s", "", text) in said or "# refused" in page


def refusal(load, arguments, environment):
    try:
        load(arguments, environment)
    except (ConfigError, ExceptionGroup) as error:
        return error
    return None


def is_away(error):
    """A file that is on the reader's machine alone."""
    return "No such file" in str(error)


def fits(path, known):
    return re.fullmatch(re.sub(r"\\\{[^}]*\\\}", "[^/]+", re.escape(known)), path.rstrip("/"))
