"""Values in columns, for people."""

from collections.abc import Sequence

_GAP = "  "


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows under their heads; columns of numbers are flush right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    numeric = [
        all(cell.lstrip("-").isdecimal() or cell == "-" for cell in column)
        for column in zip(*cells, strict=True)
    ] or [False] * len(heads)
    lines = [heads, *cells]
    return "\n".join(_line(line, widths, numeric).rstrip() for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    padded = [
        cell.rjust(width) if is_number else cell.ljust(width)
        for cell, width, is_number in zip(cells, widths, numeric, strict=True)
    ]
    return _GAP.join(padded)
