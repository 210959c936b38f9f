"""Plots of `compare.py`'s report, as SVG."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from msgspec import Struct

ROW_PX, NAME_PX, PLOT_PX, TIMES_PX = 17, 250, 430, 80
LEAST, MOST = -2, 4
"""Powers of ten that a plot has room for; beyond, a bar ends at its edge."""


class Bar(Struct, frozen=True):
    """How many times better than the peer; `goal`, on the same scale, 0: none."""

    name: str
    times: float
    goal: float = 0.0
    heading: str = ""
    """Bars of one heading stand together below it."""


def bars(drawn: Sequence[Bar]) -> str:
    """From the line at 1 to the right where ours is ahead, to the left where the peer is."""
    scale = _Scale([bar.times for bar in drawn])
    parts, y, heading = [], ROW_PX, ""
    for bar in drawn:
        if bar.heading != heading:
            heading = bar.heading
            parts.append(f'<text class="head" x="0" y="{y + 13}">{escape(heading)}</text>')
            y += ROW_PX
        parts += _bar(bar, scale, y)
        y += ROW_PX
    whole = [*_axis(scale, y), *parts]
    size = f"0 0 {NAME_PX + PLOT_PX + TIMES_PX} {y + ROW_PX + 4}"
    return f'<svg viewBox="{size}" role="img">{"".join(whole)}</svg>'


class _Scale:
    """From factors to pixels, in whole powers of ten."""

    def __init__(self, times: Iterable[float]) -> None:
        powers = [math.log10(each) for each in times]
        self.least = max(min(math.floor(min(powers)), -1), LEAST)
        self.most = min(max(math.ceil(max(powers)), 1), MOST)

    def x(self, times: float) -> float:
        power = min(max(math.log10(times), self.least), self.most)
        return NAME_PX + PLOT_PX * (power - self.least) / (self.most - self.least)


def _bar(bar: Bar, scale: _Scale, y: int) -> Iterator[str]:
    middle, end = scale.x(1), scale.x(bar.times)
    kind = "bar" if bar.times >= 1 else "worse"
    yield f'<text class="end" x="{NAME_PX - 8}" y="{y + 13}">{escape(bar.name)}</text>'
    yield (
        f'<rect class="{kind}" x="{min(middle, end):.1f}" y="{y + 4}" '
        f'width="{abs(end - middle):.1f}" height="10"/>'
    )
    if bar.goal:
        x = f"{scale.x(bar.goal):.1f}"
        yield f'<line class="goal" x1="{x}" y1="{y + 2}" x2="{x}" y2="{y + 16}"/>'
    yield f'<text x="{NAME_PX + PLOT_PX + 8}" y="{y + 13}">{factor(bar.times)}</text>'


def _axis(scale: _Scale, height: int) -> Iterator[str]:
    for power in range(scale.least, scale.most + 1):
        x, kind = f"{scale.x(10.0**power):.1f}", "grid" if power else "one"
        yield f'<line class="{kind}" x1="{x}" y1="{ROW_PX}" x2="{x}" y2="{height}"/>'
        for y in (ROW_PX - 4, height + 15):
            yield f'<text class="tick" x="{x}" y="{y}">{10.0**power:,g} ×</text>'


def factor(times: float) -> str:
    """For people."""
    return f"{times:,.0f} ×" if times >= 100 else f"{times:.3g} ×"


SHARES = {"right": "bar", "said": "said", "wrong": "wrong"}


def shares(totals: Mapping[str, Mapping[str, int]]) -> str:
    """What each got right, of all, in one bar each."""
    drawn = []
    for number, (name, counts) in enumerate(totals.items()):
        every = sum(counts[kind] for kind in SHARES) or 1
        x, y = 120.0, 26 * number
        drawn.append(f'<text class="end" x="112" y="{y + 16}">{escape(name)}</text>')
        for kind, style in SHARES.items():
            width = 600 * counts[kind] / every
            drawn.append(
                f'<rect class="{style}" x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="18"/>'
            )
            x += width
    return f'<svg viewBox="0 0 740 {26 * len(totals)}" role="img">{"".join(drawn)}</svg>'
