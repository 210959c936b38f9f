"""`kv-router conformance`: plays engine streams to a router and scores its view of the caches.

    corpus ─▶ Fleet ─▶ engines' sockets ─▶ the system ─answers─▶ Table ─▶ page, JSON, badge
                  └───▶ model of the engine ─truth───────────────┘

Exit status: 0; 1 if a system is wrong without a word, or does not start; 2 for a wrong command
line.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from router.errors import ConfigError
from router.tools.conformance.arguments import conformance_parser
from router.tools.conformance.corpus import SCENARIOS
from router.tools.conformance.player import Patience, play
from router.tools.conformance.steps import Scenario
from router.tools.conformance.systems.base import System
from router.tools.conformance.systems.kv_router import KvRouter
from router.tools.conformance.table import Table, badge, page

FULL, QUICK = Patience(1.5, 8.0, 0.1), Patience(0.5, 1.5, 0.03)


def conformance(arguments: Sequence[str]) -> int:
    """Play the corpus to one system, print the table, and return the exit status."""
    parser = conformance_parser()
    asked = parser.parse_args(arguments)
    if not chosen(asked.only):
        parser.error(f"no scenario has any of these words: {asked.only}")
    kind = _adapter(asked.adapter) if asked.adapter else KvRouter
    table, unavailable = measure(
        chosen(asked.only), {"system": kind}, QUICK if asked.quick else FULL
    )
    if unavailable:
        sys.stderr.write(f"kv-router conformance: {kind.title}: {unavailable['system']}\n")
        return 1
    head = f"{kind.title}, by the corpus of kv-router {version('kv-router')}"
    found = {"system": kind.title, "corpus": version("kv-router"), **table.as_builtins()}
    sys.stdout.write(page(table, head, (), ()))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    if asked.badge:
        asked.badge.write_text(badge(table.by_cause("system")))
    return int(table.is_silently_wrong("system"))


def chosen(words: str) -> tuple[Scenario, ...]:
    """Return the scenarios with one of the words in name, group or cause; all without words."""
    wanted = [word.strip() for word in words.split(",")]
    return tuple(
        scenario
        for scenario in SCENARIOS
        if any(w in f"{scenario.group}: {scenario.name}: {scenario.cause}" for w in wanted)
    )


def measure(
    scenarios: tuple[Scenario, ...], kinds: Mapping[str, type[System]], patience: Patience
) -> tuple[Table, dict[str, str]]:
    """Play scenarios; return the table, and systems that are not available with the reason."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as directory:
        rows, unavailable = asyncio.run(play(scenarios, kinds, Path(directory), patience))
    titles = {name: kind.title for name, kind in kinds.items() if name not in unavailable}
    return Table(scenarios, titles, tuple(rows)), unavailable


def _adapter(name: str) -> Any:
    """Return the class `module:Class`, looked up in the current folder as well."""
    module, _, member = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(import_module(module), member)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            "adapter", f"{name!r}: {error}", "MODULE:CLASS of a Python class"
        ) from error
