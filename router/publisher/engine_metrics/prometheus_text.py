"""A parser of Prometheus text expositions.

Only wanted metrics are parsed: the line of any other one costs a comparison. Comments, types,
exemplars and timestamps are skipped.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping

from msgspec import Struct

from router.errors import WireError

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(,|(?=\}))')
_VALUE = re.compile(r"\s*(\S+)(?:\s+-?\d+)?\s*(?:#.*)?")
_ESCAPED = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n"}


class Sample(Struct, frozen=True):
    """One value with its labels."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse_samples(text: str, names: Collection[str]) -> Iterator[Sample]:
    """Yield finite samples of these metrics, in order. Raises WireError at a malformed one."""
    for number, line in enumerate(text.splitlines(), 1):
        name = _NAME.match(line)
        if name is None or name[0] not in names:
            continue
        try:
            sample = _sample(name[0], line[name.end() :])
        except ValueError as error:
            raise WireError(f"line {number} is no sample: {line[:100]!r}") from error
        if math.isfinite(sample.value):
            yield sample


def _sample(name: str, rest: str) -> Sample:
    """Parse the rest of a line after its name. Raises ValueError."""
    labels, end = _labels(rest) if rest.startswith("{") else ({}, 0)
    value = _VALUE.fullmatch(rest, end)
    if value is None:
        raise ValueError(rest)
    return Sample(name, labels, float(value[1]))


def _labels(text: str) -> tuple[dict[str, str], int]:
    """Return the labels between braces, and the position after them. Raises ValueError."""
    labels: dict[str, str] = {}
    at = 1
    while label := _LABEL.match(text, at):
        labels[label[1]] = _ESCAPED.sub(lambda m: _ESCAPES.get(m[1], m[1]), label[2])
        at = label.end()
    if not text.startswith("}", at):
        raise ValueError(text)
    return labels, at + 1
