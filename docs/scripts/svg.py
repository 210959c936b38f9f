"""Pictures of boxes and arrows, readable on light and dark pages."""

from collections.abc import Sequence
from html import escape

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1b1f24 }
.small { font-size: 11px; fill: #57606a }
.mono { font-family: ui-monospace, monospace; font-size: 11px }
.title { font-weight: 600 }
.box { fill: #f6f8fa; stroke: #8c959f }
.held { fill: #cfe8d5; stroke: #2f7d46 }
.warm { fill: #fdeac0; stroke: #9a6700 }
.bad { fill: #fbdcd9; stroke: #b42318 }
.arrow { stroke: #57606a; stroke-width: 1.4; fill: none; marker-end: url(#head) }
#head path { fill: #57606a }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9da7b1 }
  .box { fill: #21262d; stroke: #6e7681 } .held { fill: #173a24; stroke: #4cae6b }
  .warm { fill: #40320d; stroke: #d4a72c } .bad { fill: #4b1a17; stroke: #f0695e }
  .arrow { stroke: #9da7b1 } #head path { fill: #9da7b1 }
}
"""
HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z"/></marker>'
)


class Picture:
    """Elements in the order in which they are drawn; lengths in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        self._title = title
        self._drawn: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        """One line, by its base line."""
        self._drawn.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        lines: Sequence[str],
        kind: str = "box",
    ) -> None:
        """Lines in its middle, the first of them its title."""
        self._drawn.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{kind}"/>'
        )
        first = y + height / 2 - 8 * (len(lines) - 1) + 4
        for number, line in enumerate(lines):
            self.text(x + width / 2, first + 16 * number, line, "small" if number else "title")

    def arrow(self, *points: tuple[float, float], label: str = "", kind: str = "small") -> None:
        """Along these points; the label stands above the middle of the first two."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._drawn.append(f'<polyline points="{path}" class="arrow"/>')
        (x1, y1), (x2, y2) = points[:2]
        if label:
            self.text((x1 + x2) / 2, (y1 + y2) / 2 - 6, label, kind)

    def svg(self) -> str:
        """Return the text of the file."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {self._size} role="img">'
        title = f"<title>{escape(self._title)}</title><style>{STYLE}</style><defs>{HEAD}</defs>"
        return "\n".join([head, title, *self._drawn, "</svg>", ""])
