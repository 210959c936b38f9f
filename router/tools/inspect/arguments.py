"""The command line of `kv-router inspect`."""

import os
import re
import sys
from argparse import SUPPRESS, ArgumentTypeError
from pathlib import Path

import msgspec

from router.errors import InvalidFieldError
from router.protocol.values import U32_MAX, U64_MAX, UNREADABLE
from router.runtime.process.command_line import Parser, add_access, as_url
from router.runtime.process.settings import CLIENT_PREFIX

DEFAULT_URL = "http://localhost:8092"

_SEPARATOR = re.compile(r"[\s,]+")
_NO_TOKENS = f"token ids, 0 to {U32_MAX}: a JSON list, or numbers with white space between"


def inspect_parser() -> Parser:
    """Return the parser of `kv-router inspect`; `what` is the query."""
    parser = Parser(
        prog="kv-router inspect", description="Print the state of a running router, or a recording."
    )
    add_router(parser)
    parser.add_argument("--json", action="store_true", help="print the router's response as JSON")
    questions = parser.add_subparsers(dest="what", required=True, metavar="QUESTION")
    questions.add_parser("workers", help="all workers, with their numbers of blocks")
    worker = questions.add_parser("worker", help="the blocks and the load of a worker")
    worker.add_argument("worker_id", type=natural, metavar="ID")
    rank = questions.add_parser("rank", help="the same for one data-parallel rank")
    rank.add_argument("worker_id", type=natural, metavar="ID")
    rank.add_argument("dp_rank", type=natural, metavar="DP")
    for each in (worker, rank):
        each.add_argument("--blocks", action="store_true", help="list the blocks it holds")
    _add_prompt(questions.add_parser("prompt", help="the blocks of a prompt that each rank holds"))
    block = questions.add_parser("block", help="the ranks that hold a block")
    block.add_argument(
        "sequence_hash", type=u64, metavar="HASH", help="decimal (signed or unsigned), or 0x…"
    )
    recording = questions.add_parser("recording", help="what a recording contains; asks no router")
    recording.add_argument("file", type=Path, metavar="FILE", help="the newest of its files")
    for question in parser.subcommands.values():
        _add_again(question)
    return parser


def _add_again(question: Parser) -> None:
    """Add the options before a question also behind it, where they have no defaults."""
    own = question.options
    add_router(question)
    question.add_argument("--json", action="store_true", help="print the router's response as JSON")
    for option in question.options:
        if option not in own:
            option.default = SUPPRESS


def attach_parser() -> Parser:
    """Return the parser of `kv-router attach`."""
    parser = Parser(
        prog="kv-router attach",
        description="Let a running router attach an engine, which is asked for all it needs.",
    )
    text = (
        "URL of the engine's OpenAI server, with ;events=tcp://HOST:PORT if it does not name "
        "its event sockets itself"
    )
    parser.add_argument("engine", metavar="ENGINE", help=text)
    add_router(parser, "--router-url")
    parser.add_argument("--json", action="store_true", help="print the router's response as JSON")
    return parser


def add_router(parser: Parser, *other_names: str) -> None:
    """Add the option with the router's URL, and those of the credentials for it.

    `other_names`: of the first option, also accepted.
    """
    variable = f"{CLIENT_PREFIX}URL"
    default = os.environ.get(variable, "") or DEFAULT_URL
    text = f"URL of the router, with or without http:// (or {variable}; default: {DEFAULT_URL})"
    parser.add_argument(
        "--url", *other_names, dest="url", default=default, type=as_url, metavar="URL", help=text
    )
    add_access(parser, "router")


def _add_prompt(prompt: Parser) -> None:
    tokens = "file with the prompt's token ids, - for standard input"
    prompt.add_argument("--tokens", required=True, metavar="FILE", help=tokens)
    prompt.add_argument(
        "--model",
        default="default",
        dest="model_name",
        metavar="NAME",
        help="model (default: %(default)s)",
    )
    prompt.add_argument(
        "--group",
        default="default",
        dest="routing_group",
        metavar="NAME",
        help="routing group (default: %(default)s)",
    )
    prompt.add_argument(
        "--lora",
        default=None,
        dest="lora_name",
        metavar="NAME",
        help="LoRA adapter that the prompt is for",
    )
    prompt.add_argument(
        "--salt", default=None, dest="cache_salt", metavar="SALT", help="cache salt of the request"
    )


def natural(text: str) -> int:
    """Return a number of at least 0."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a number from 0")
    return int(text)


def u64(text: str) -> int:
    """Return a 64-bit number, signed or unsigned, decimal or hexadecimal, as unsigned."""
    try:
        number = int(text, 0)
    except ValueError:
        number = U64_MAX + 1
    if not -(2**63) <= number <= U64_MAX:
        raise ArgumentTypeError(f"{text!r} is not a 64-bit hash, decimal or 0x…")
    return number & U64_MAX


def read_tokens(path: str) -> list[int]:
    """Return the token ids of a file. Raises InvalidFieldError."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidFieldError("tokens", str(error), "a readable file, or -") from error
    return parse_tokens(text)


def parse_tokens(text: str) -> list[int]:
    """Return the token ids of a text. Raises InvalidFieldError."""
    is_list = text.lstrip().startswith("[")
    listed = text if is_list else f"[{','.join(_SEPARATOR.split(text.strip()))}]"
    try:
        tokens = msgspec.json.decode(listed, type=list[int])
    except UNREADABLE as error:
        raise InvalidFieldError("tokens", str(error), _NO_TOKENS) from error
    wrong = [token for token in tokens if not 0 <= token <= U32_MAX]
    if wrong or not tokens:
        raise InvalidFieldError("tokens", str(wrong[0]) if wrong else "none", _NO_TOKENS)
    return tokens
