"""Plain-text tables for terminals, and the names of tiers in them."""

import re
from collections.abc import Mapping, Sequence

from router.protocol.dumps import TIER_NAMES, TierName

_GAP = "  "


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return rows under their column heads; numeric columns are right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    numeric = [all(map(_is_number, column)) for column in zip(*cells, strict=True)]
    numeric = numeric or [False] * len(heads)
    lines = [heads, *cells]
    return "\n".join(_line(line, widths, numeric).rstrip() for line in lines)


def _is_number(cell: str) -> bool:
    """Return whether a cell is a number with an optional sign, separators or percent, or a dash."""
    return cell == "-" or re.fullmatch(r"[-+]?\d[\d,]*(\.\d+)?%?", cell) is not None


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    padded = [
        cell.rjust(width) if is_number else cell.ljust(width)
        for cell, width, is_number in zip(cells, widths, numeric, strict=True)
    ]
    return _GAP.join(padded)


TIER_WORDS: Mapping[TierName, str] = dict(
    zip(TIER_NAMES, ("device", "host", "disk", "remote"), strict=True)
)
