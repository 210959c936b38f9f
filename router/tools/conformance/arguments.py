"""The command line of `kv-router conformance`, without its corpus, which is slow to import."""

from pathlib import Path

from router.runtime.process.command_line import Parser


def conformance_parser() -> Parser:
    """Return the parser of `kv-router conformance`."""
    parser = Parser(
        prog="kv-router conformance",
        description="Play engine event streams and faults to a router over real sockets, and "
        "compare the blocks that it counts as cached with an exact model of the engine.",
    )
    parser.add_argument(
        "--adapter",
        metavar="MODULE:CLASS",
        default="",
        help="the router under test, a class with the methods of "
        "router.tools.conformance.systems.base:System; without it, kv-router",
    )
    parser.add_argument(
        "--only",
        metavar="WORDS",
        default="",
        help="only scenarios with one of these words in group, name or cause, comma-separated",
    )
    parser.add_argument("--quick", action="store_true", help="less patience: 45 s at most")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all answers to a file")
    parser.add_argument("--badge", type=Path, metavar="FILE", help="write an SVG badge to a file")
    return parser
