import re

import numpy as np
import pytest

from router.tools.simulate.svg_plot import COLOURS, HEIGHT, WIDTH, Axis, Plot, legend_key, svg


def plot(curves, **axis):
    written = Axis("x <&>", "{:g}".format, **axis)
    return svg(Plot("a <plot>", written, Axis("y", "{:g}".format), curves))


def ticks(text):
    return [float(tick) for tick in re.findall(r'class="tick" [^>]*>([^<]*)<', text)]


def points(text):
    return [
        [tuple(map(float, point.split(","))) for point in line.split()]
        for line in re.findall(r'points="([^"]*)"', text)
    ]


def test_lines_lie_within_the_axes_and_keep_their_order():
    text = plot(
        [("up", (np.arange(5.0), np.arange(5.0) ** 2)), ("flat", (np.arange(5.0), np.ones(5)))]
    )
    up, flat = points(text)
    assert [x for x, _ in up] == sorted(x for x, _ in up)
    assert [y for _, y in up] == sorted((y for _, y in up), reverse=True)
    assert len({y for _, y in flat}) == 1
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in up + flat)


def test_names_are_escaped():
    assert "x &lt;&amp;&gt;" in plot([("<b>", (np.arange(2.0), np.arange(2.0)))])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 10], [0, 2, 4, 6, 8, 10]),
        ([3, 61], [10, 20, 30, 40, 50, 60]),
        ([0, 0.7], [0, 0.2, 0.4, 0.6]),
    ],
)
def test_ticks_are_round(values, expected):
    text = plot([("a", (np.array(values, float), np.zeros(2)))])
    assert ticks(text) == pytest.approx(expected)


def test_logarithmic_ticks():
    few = plot([("a", (np.array([0.02, 1.3]), np.zeros(2)))], is_logarithmic=True)
    assert ticks(few) == pytest.approx([0.02, 0.05, 0.1, 0.2, 0.5, 1])
    many = plot([("a", (np.array([0.001, 50.0]), np.zeros(2)))], is_logarithmic=True)
    assert ticks(many) == pytest.approx([0.001, 0.01, 0.1, 1, 10])


def test_nothing_to_draw_is_drawn():
    assert points(plot([("none", (np.zeros(0), np.zeros(0)))])) == [[]]


def test_more_lines_than_colours_are_dashed():
    assert "dashed" not in legend_key(COLOURS - 1)
    assert "line-0 dashed" in legend_key(COLOURS)
