"""Values in columns, for people."""

import re
from collections.abc import Sequence

_GAP = "  "


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows under their heads; columns of numbers are flush right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    numeric = [all(map(_is_number, column)) for column in zip(*cells, strict=True)]
    numeric = numeric or [False] * len(heads)
    lines = [heads, *cells]
    return "\n".join(_line(line, widths, numeric).rstrip() for line in lines)


def _is_number(cell: str) -> bool:
    """With a sign, separators or a percent sign, too; or a dash for none."""
    return cell == "-" or re.fullmatch(r"[-+]?\d[\d,]*(\.\d+)?%?", cell) is not None


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    padded = [
        cell.rjust(width) if is_number else cell.ljust(width)
        for cell, width, is_number in zip(cells, widths, numeric, strict=True)
    ]
    return _GAP.join(padded)
