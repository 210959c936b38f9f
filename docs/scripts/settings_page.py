"""docs/settings.md: every setting of every process, from the rows that make flags and help."""

from collections.abc import Iterator

from msgspec import Struct

from router.config.indexer import IndexerConfig
from router.config.router import RouterConfig
from router.forward.config import EppConfig, ForwardConfig
from router.runtime.process.settings import (
    AGENT_PREFIX,
    COMMON,
    FORWARD_PREFIX,
    INDEXER_PREFIX,
    LIVE,
    ROUTER_PREFIX,
    UP_PREFIX,
    Setting,
    flags_of,
    settings_of,
)
from router.tools.up.config import UpConfig
from worker_agent.config.bridge import BridgeConfig
from worker_agent.config.reference import ReferenceConfig

PROCESSES: tuple[tuple[str, type[Struct], str], ...] = (
    ("kv-router serve", RouterConfig, ROUTER_PREFIX),
    ("kv-router forward", ForwardConfig, FORWARD_PREFIX),
    ("kv-router epp", EppConfig, FORWARD_PREFIX),
    ("kv-router indexer", IndexerConfig, INDEXER_PREFIX),
    ("kv-worker-agent run", ReferenceConfig, AGENT_PREFIX),
    ("kv-worker-agent run --engine vllm", BridgeConfig, AGENT_PREFIX),
    ("kv-router up", UpConfig, UP_PREFIX),
)

HEAD = """\
# Settings

<!-- Made by `make docs` from the source. -->

A setting is a flag (`--nats-url`), a variable of the environment (`KV_ROUTER_NATS_URL`, with the prefix of the process) and a key of the
file that `--config` names (`nats_url`, TOML): a flag overrides the environment, which overrides the file. `--help` shows those in **bold**,
which people change; `--help-all` shows all. `--show-config`, `kv-router config` and `GET /config` say what is in force and where it comes
from. A wrong name or value is refused at the start, with what is allowed.

`now` in the column SIGHUP: `kill -HUP` of a router, an indexer or a forwarder reads its configuration again, and a change of the setting takes effect at once; a change of any
other setting is named in the log, and takes effect at a restart. Files with tokens, keys and certificates are read again when they change.
"""
TABLE = """
| setting | value | default | SIGHUP | |
|---|---|---|---|---|
"""


def page() -> str:
    """Return the page, a process at a time; settings that an earlier one has are named alone."""
    known: dict[tuple[str, str], str] = {}
    return "".join([HEAD, *(_process(*each, known) for each in PROCESSES)])


def _process(
    program: str, config_type: type[Struct], prefix: str, known: dict[tuple[str, str], str]
) -> str:
    rows: dict[str, list[Setting]] = {}
    as_before: dict[str, list[str]] = {}
    for each in settings_of(config_type()):
        key = (each.name, f"{each.text} {_default(each)}")
        if key in known:
            as_before.setdefault(known[key], []).append(each.name)
        else:
            known[key] = program
            rows.setdefault(each.group, []).append(each)
    parts = [f"\n## {program}\n\nPrefix of variables: `{prefix}`\n"]
    for group, settings in rows.items():
        parts += [f"\n### {group}\n" if group else "", TABLE, *map(_row, settings)]
    for other, names in as_before.items():
        listed = ", ".join(f"`{name}`" for name in names)
        parts.append(f"\nAs of `{other}`: {listed}.\n")
    return "".join(parts)


def _row(each: Setting) -> str:
    name = f"**`{each.name}`**" if each.has_mark(COMMON) else f"`{each.name}`"
    short = flags_of(each.name)[0]
    flag = f" (`{short}`)" if len(flags_of(each.name)) > 1 else ""
    value = "yes, no" if isinstance(each.value, bool) else ", ".join(_value(each))
    live = "now" if each.has_mark(LIVE) else ""
    return f"| {name}{flag} | {value} | {_default(each)} | {live} | {_cell(each.text)} |\n"


def _value(each: Setting) -> Iterator[str]:
    yield from (f"`{choice}`" for choice in each.choices)
    if not each.choices:
        yield each.unit


def _default(each: Setting) -> str:
    if each.name == "name":
        return "this host's name"
    if each.value in (None, ""):
        return ""
    if isinstance(each.value, bool):
        return "yes" if each.value else "no"
    return f"`{each.value:g}`" if isinstance(each.value, float) else f"`{each.value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
