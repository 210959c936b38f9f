"""Line plots as SVG: no library, no script, colours by the page's style sheet."""

from collections.abc import Callable, Sequence
from html import escape
from math import ceil, floor, log10

from msgspec import Struct

from router.simulator.summary import Curve

WIDTH, HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 12, 44
COLOURS = 8
"""The number of styles `line-0` … in the style sheet; further lines are dashed."""


class Axis(Struct, frozen=True):
    """One axis: its title, its number format, and its scale."""

    title: str
    write: Callable[[float], str]
    is_logarithmic: bool = False
    starts_at_zero: bool = False


class Plot(Struct, frozen=True):
    """Lines by name, on two axes."""

    title: str
    x: Axis
    y: Axis
    curves: Sequence[tuple[str, Curve]]


class _Scale:
    """A map from values to coordinates, with ticks."""

    __slots__ = ("_from", "_high", "_is_logarithmic", "_low", "_to", "ticks")

    def __init__(self, axis: Axis, low: float, high: float, from_: float, to: float) -> None:
        self._is_logarithmic = axis.is_logarithmic
        if axis.is_logarithmic:
            low, high = log10(max(low, 1e-9)), log10(max(high, 1e-9))
        elif axis.starts_at_zero:
            low = 0.0
        if high - low < 1e-9:
            high = low + 1.0
        self._low, self._high, self._from, self._to = low, high, from_, to
        self.ticks = _log_ticks(low, high) if axis.is_logarithmic else _ticks(low, high)

    def __call__(self, value: float) -> float:
        if self._is_logarithmic:
            value = log10(max(value, 1e-9))
        fraction = (value - self._low) / (self._high - self._low)
        return self._from + (self._to - self._from) * min(max(fraction, 0.0), 1.0)


def svg(plot: Plot) -> str:
    """Return the plot as an `svg` element. O(points)."""
    xs = [float(x) for _, (values, _) in plot.curves for x in values]
    ys = [float(y) for _, (_, values) in plot.curves for y in values]
    x = _Scale(plot.x, min(xs, default=0), max(xs, default=1), _LEFT, WIDTH - _RIGHT)
    y = _Scale(plot.y, min(ys, default=0), max(ys, default=1), HEIGHT - _BOTTOM, _TOP)
    lines = [_line(i, name, curve, x, y) for i, (name, curve) in enumerate(plot.curves)]
    return "\n".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(plot.title)}">',
            *(_x_tick(x(tick), plot.x.write(tick)) for tick in x.ticks),
            *(_y_tick(y(tick), plot.y.write(tick)) for tick in y.ticks),
            _text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, "title", plot.x.title),
            *lines,
            "</svg>",
        ]
    )


def legend_key(index: int) -> str:
    """Return a short line in the style of the line with this index."""
    return (
        f'<svg class="key" viewBox="0 0 28 8" aria-hidden="true">'
        f'<path class="{_style(index)}" d="M1 4H27"/></svg>'
    )


def _line(index: int, name: str, curve: Curve, x: _Scale, y: _Scale) -> str:
    points = " ".join(f"{x(float(a)):.1f},{y(float(b)):.1f}" for a, b in zip(*curve, strict=True))
    style = _style(index)
    return f'<polyline class="{style}" points="{points}"><title>{escape(name)}</title></polyline>'


def _style(index: int) -> str:
    dashed = " dashed" * (index // COLOURS % 2)
    return f"line line-{index % COLOURS}{dashed}"


def _x_tick(place: float, text: str) -> str:
    grid = f'<path class="grid" d="M{place:.1f} {_TOP}V{HEIGHT - _BOTTOM}"/>'
    return grid + _text(place, HEIGHT - _BOTTOM + 16, "tick", text)


def _y_tick(place: float, text: str) -> str:
    grid = f'<path class="grid" d="M{_LEFT} {place:.1f}H{WIDTH - _RIGHT}"/>'
    return grid + _text(_LEFT - 6, place + 4, "tick end", text)


def _text(x: float, y: float, style: str, text: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _ticks(low: float, high: float) -> list[float]:
    """Return about six round values."""
    rough = (high - low) / 6
    power = 10.0 ** floor(log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough)
    return [i * step for i in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 of each decade if there are few decades, else the decades."""
    factors = (1, 2, 5) if high - low < 2.5 else (1,)
    ticks = [f * 10.0**decade for decade in range(floor(low), ceil(high) + 1) for f in factors]
    return [tick for tick in ticks if low - 1e-9 <= log10(tick) <= high + 1e-9]
