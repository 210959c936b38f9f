"""The report of `compare.py`, in the style of `kv-router simulate --html`."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from compare_parts import Outcome

STYLE = """
.bar { fill: var(--c2) } .worse { fill: var(--c1) }
.said { fill: var(--c4) } .wrong { fill: #c2362b }
.one { stroke: var(--muted); stroke-width: 1.5 } pre { overflow-x: auto; font-size: .82rem }
figure > svg { max-width: 60rem } td.no { color: var(--c1); font-weight: 700 }
"""
READING = (
    "Bars: how many times better than the peer, by factors; right of the line ours is ahead, left "
    "of it the peer. A row without a peer has a goal of its own. Compare ratios, not machines: a "
    "machine that does other things beside gives other figures."
)
BAR_PX, NAME_PX, HALF_PX = 16, 300, 200
FACTORS = 3.0
"""Powers of ten that half of a plot has room for."""


def page(facts: Mapping[str, str], outcomes: Sequence[Outcome]) -> str:
    """The whole file."""
    style = files("router.tools.simulation").joinpath("html_report.css").read_text() + STYLE
    told = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>kv-router beside its peers</title>\n<style>\n{style}</style>\n</head>\n<body>",
            f'<h1>kv-router beside its peers</h1>\n<p class="muted">{READING}</p>\n<dl>{told}</dl>',
            *map(_section, outcomes),
            "</body>\n</html>\n",
        ]
    )


def _section(outcome: Outcome) -> str:
    part = outcome.part
    head = (
        f'<h2>{escape(part.title)}</h2>\n<p class="muted">beside: {escape(part.peer)}; '
        f"<code>{escape(outcome.command)}</code>, {outcome.seconds:.0f} s</p>"
    )
    if outcome.failure:
        return f"{head}\n<p>Not measured here:</p>\n<pre>{escape(outcome.failure)}</pre>"
    body = {"rows": _rows, "faults": _faults, "replays": _replays}[part.kind]
    return f"{head}\n{body(outcome.found)}"


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    beside = [row for row in rows if row["peer"] and row["peer"] != row["goal"] and row["ours"]]
    cells = [
        (
            _name(row), _figure(row["ours"]), _figure(row["peer"]) if row in beside else "",
            row["unit"], f"{row['ratio']:.2f}" if row in beside else "",
            "yes" if row["holds"] else "NO",
        )
        for row in rows
    ]  # fmt: skip
    heads = ("", "ours", "peer", "unit", "ratio", "meets its goal")
    plot = f"<figure>{_bars([(row['name'], times_better(row)) for row in beside])}</figure>"
    return f"{plot if beside else ''}\n{_table(heads, cells)}"


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['section']}: {row['name']}" if "section" in row else str(row["name"])


def times_better(row: Mapping[str, Any]) -> float:
    """Above 1: ours is ahead, whichever way its ratio is counted."""
    ratio = float(row["ratio"])
    return 1 / ratio if row["lower"] else ratio


def _bars(named: Sequence[tuple[str, float]]) -> str:
    height = BAR_PX * len(named) + 24
    middle = NAME_PX + HALF_PX
    drawn = [f'<line class="one" x1="{middle}" y1="0" x2="{middle}" y2="{height - 20}"/>']
    for number, (name, times) in enumerate(named):
        y = BAR_PX * number
        length = HALF_PX * min(abs(math.log10(times)) / FACTORS, 1.0)
        x, kind = (middle, "bar") if times >= 1 else (middle - length, "worse")
        drawn += [
            f'<text class="end" x="{NAME_PX - 8}" y="{y + 12}">{escape(name)}</text>',
            f'<rect class="{kind}" x="{x:.1f}" y="{y + 3}" width="{length:.1f}" height="10"/>',
            f'<text x="{middle + HALF_PX + 8}" y="{y + 12}">{times:.3g} ×</text>',
        ]
    drawn.append(f'<text class="title" x="{middle}" y="{height - 6}">1 ×</text>')
    size = f"0 0 {NAME_PX + 2 * HALF_PX + 80} {height}"
    return f'<svg viewBox="{size}" role="img">{"".join(drawn)}</svg>'


def _faults(found: Mapping[str, Any]) -> str:
    missing = "".join(
        f"<p>Not here: {escape(name)}: {escape(why)}</p>"
        for name, why in found["unavailable"].items()
    )
    totals = found["totals"]
    cells = [
        (name, *(str(t[word]) for word in ("right", "said", "wrong", "ghosts", "missing")))
        for name, t in totals.items()
    ]
    heads = ("", "right", "wrong, and said so", "wrong without a word", "ghosts", "missing blocks")
    return f"{missing}<figure>{_shares(totals)}</figure>\n{_table(heads, cells)}"


def _shares(totals: Mapping[str, Mapping[str, int]]) -> str:
    drawn = []
    for number, (name, counts) in enumerate(totals.items()):
        every = sum(counts[kind] for kind in ("right", "said", "wrong")) or 1
        x, y = 120.0, 26 * number
        drawn.append(f'<text class="end" x="112" y="{y + 16}">{escape(name)}</text>')
        for kind, style in (("right", "bar"), ("said", "said"), ("wrong", "wrong")):
            width = 600 * counts[kind] / every
            drawn.append(
                f'<rect class="{style}" x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="18"/>'
            )
            x += width
    return f'<svg viewBox="0 0 740 {26 * len(totals)}" role="img">{"".join(drawn)}</svg>'


REPLAYED = {
    "TTFT mean (s)": "ttft_mean_s", "median": "ttft_median_s", "p99": "ttft_p99_s",
    "end to end mean (s)": "e2e_mean_s", "per output token (s)": "tpot_mean_s",
    "hit rate": "hit_rate",
}  # fmt: skip


def _replays(runs: Sequence[Mapping[str, Any]]) -> str:
    ours, *others = runs
    beside = [(run["policy"], run["ttft_mean_s"] / ours["ttft_mean_s"]) for run in others]
    cells = [(run["policy"], *(_figure(run[field]) for field in REPLAYED.values())) for run in runs]
    note = f'<p class="muted">Mean time to first token of each, by that of {ours["policy"]}.</p>'
    return f"{note}<figure>{_bars(beside)}</figure>\n{_table(('', *REPLAYED), cells)}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    table = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>"
    return f'<div class="wide"><table>\n{table}</table></div>'


def _cell(text: str) -> str:
    style = ' class="no"' if text == "NO" else ""
    return f"<td{style}>{escape(text)}</td>"


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
