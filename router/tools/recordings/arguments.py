"""The settings of `kv-router record`, and the command line of `kv-router replay`."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from msgspec import Struct, structs

from router.config.load import check_router, completed, load_extended, with_warnings
from router.config.router import DECISION_SETTINGS, RouterConfig
from router.errors import ConfigError
from router.runtime.process.command_line import Parser, add_setting, number_within
from router.runtime.process.settings import COMMON, about, settings_of
from router.tools.inspect.arguments import natural


class RecordConfig(Struct, frozen=True, kw_only=True):
    """Settings of a recording router: those of any router, and the limits of the recording."""

    GROUP: ClassVar[str] = "recording"

    router: RouterConfig = RouterConfig()
    output: Annotated[
        str,
        about(
            "file to write; it must not exist yet, and will contain prompts", COMMON, unit="FILE"
        ),
    ] = ""
    max_records: Annotated[
        int, about("stop after this many records; 0: no limit", ge=0, unit="RECORDS")
    ] = 0
    max_bytes: Annotated[
        int, about("stop before the file gets larger than this", COMMON, ge=4096)
    ] = 1 << 30
    seconds: Annotated[
        float, about("stop after this time; 0: no limit", COMMON, ge=0, unit="SECONDS")
    ] = 0.0


def load_record_config(arguments: Sequence[str], environment: Mapping[str, str]) -> RecordConfig:
    """Return the settings of a recording router. Raises ConfigError."""
    loaded = load_extended(RecordConfig, arguments, environment)
    config, router = loaded.config, loaded.config.router
    check_router(router, loaded.sources)
    if not config.output:
        raise ConfigError("output", "missing", "a file to write, as --output FILE")
    if router.observability.record_to:
        raise ConfigError("record_to", "beside --output", "one of the two; serve --record-to FILE")
    if router.index.event_threads != 1:
        problem = f"{router.index.event_threads}: the timing of threads cannot be replayed"
        raise ConfigError("event_threads", problem, "1")
    config = structs.replace(config, router=completed(router))
    return with_warnings(structs.replace(loaded, config=config), config.router).shown()


def replay_parser() -> Parser:
    """Return the parser of `kv-router replay`."""
    parser = Parser(
        prog="kv-router replay",
        description="Replay a recording, and compare every decision with the recorded one.",
    )
    parser.add_argument("file", metavar="FILE", help="recording, as written by `kv-router record`")
    parser.add_argument(
        "--speed",
        type=number_within(0, 1e6),
        default=0.0,
        metavar="X",
        help="1: in real time; 10: ten times as fast; 0 (default): as fast as possible",
    )
    parser.add_argument(
        "--limit",
        type=natural,
        default=0,
        metavar="N",
        help="replay only the first N lines after the header; 0 (default): all",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    _add_settings(parser.add_argument_group("settings", "in place of the recorded ones"))
    return parser


def _add_settings(group: argparse._ArgumentGroup) -> None:
    for each in settings_of(RouterConfig()):
        if each.name in DECISION_SETTINGS:
            add_setting(group, each, each.text)
