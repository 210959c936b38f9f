"""The report of `compare.py`, in the style of `kv-router simulate --html`."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from compare_parts import NotMade, Outcome
from compare_plots import Bar, bars, factor, shares

STYLE = """
.bar { fill: var(--c2) } .worse { fill: var(--c1) }
.said { fill: var(--c4) } .wrong { fill: #c2362b }
.one { stroke: var(--muted); stroke-width: 1.5 } .goal { stroke: var(--ink); stroke-width: 2 }
text.head { font-weight: 600; fill: var(--ink) } pre { overflow-x: auto; font-size: .82rem }
figure > svg { max-width: 60rem } td.no { color: var(--c1); font-weight: 700 }
h3 { margin-top: 1.2rem } details { margin-top: .6rem }
summary { cursor: pointer; color: var(--muted); font-size: .9rem }
.swatch { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem }
"""
READING = (
    "Bars: how many times better than the peer, by factors; right of the line at 1 × ours is "
    "ahead, left of it the peer. A short upright line is the goal that was set before; a figure "
    "without a peer has a goal of its own. Compare factors, not machines: a machine that does "
    "other things beside gives other figures, and other p99s most of all."
)
NO = "NO"


def page(
    facts: Mapping[str, str], outcomes: Sequence[Outcome], not_run: Sequence[NotMade] = ()
) -> str:
    """Return the whole file. `not_run`: tables for which no command was run."""
    style = files("router.tools.simulate").joinpath("html_report.css").read_text() + STYLE
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>kv-router beside its peers</title>\n<style>\n{style}</style>\n</head>\n<body>",
            f'<h1>kv-router beside its peers</h1>\n<p class="muted">{READING}</p>',
            f"<dl>{items}</dl>",
            _summary([each for each in outcomes if each.part.kind == "rows" and not each.failure]),
            _not_made([*map(_failed, filter(_has_failed, outcomes)), *not_run]),
            *map(_section, outcomes),
            "</body>\n</html>\n",
        ]
    )


def _summary(outcomes: Sequence[Outcome]) -> str:
    """Return counts of each part, and the figures that miss their goals."""
    if not outcomes:
        return ""
    counted = [(_title(each), *_counts(each.found)) for each in outcomes]
    missed = [
        (
            f"{_title(each)}: {_name(row)}",
            _figure(row["ours"]),
            row["unit"],
            _ahead(row),
            _goal(row),
        )
        for each in outcomes
        for row in each.found
        if not row["holds"]
    ]
    heads = ("", "figures", "ahead of the peer", "behind it", "goals met", "missed")
    missing = (
        f"<h3>Goals that were missed</h3>\n"
        f"{_table(('', 'ours', 'unit', 'beside the peer', 'goal'), missed)}"
    )
    return f"<h2>In short</h2>\n{_table(heads, counted)}\n{missing if missed else ''}"


def _has_failed(outcome: Outcome) -> bool:
    return bool(outcome.failure)


def _failed(outcome: Outcome) -> NotMade:
    last_words = outcome.failure.splitlines()[-2:]  # of its log, and that it printed no figures
    return NotMade(_title(outcome), last_words[0], outcome.remedy or "see the end of its log below")


def _not_made(tables: Sequence[NotMade]) -> str:
    """Return the tables that are missing, why, and what makes them."""
    if not tables:
        return ""
    cells = [(each.table, each.why, each.remedy) for each in tables]
    return f"<h3>Tables that were not made</h3>\n{_table(('', 'why', 'what makes it'), cells)}"


def _title(outcome: Outcome) -> str:
    _, _, only = outcome.command.partition("--only ")
    return f"{outcome.part.title}: {only.replace(',', ', ')}" if only else outcome.part.title


def _counts(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    ahead = [times_better(row) >= 1 for row in rows if _has_peer(row)]
    held = [row["holds"] for row in rows]
    counts = (len(rows), sum(ahead), len(ahead) - sum(ahead), sum(held), len(held) - sum(held))
    return tuple(map(str, counts))


def _section(outcome: Outcome) -> str:
    head = (
        f"<h2>{escape(_title(outcome))}</h2>\n"
        f'<p class="muted">beside: {escape(outcome.part.peer)}; '
        f"<code>{escape(outcome.command)}</code>, {outcome.seconds:.0f} s</p>"
    )
    if outcome.failure:
        return f"{head}\n<p>Not measured here:</p>\n<pre>{escape(outcome.failure)}</pre>"
    body = {"rows": _rows, "faults": _faults, "replays": _replays}[outcome.part.kind]
    return f"{head}\n{body(outcome.found)}"


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [
        (
            _name(row), _figure(row["ours"]), _figure(row["peer"]) if _has_peer(row) else "",
            row["unit"], _ahead(row), _goal(row), "yes" if row["holds"] else NO,
        )
        for row in rows
    ]  # fmt: skip
    heads = ("", "ours", "peer", "unit", "times better", "goal", "met")
    drawn = [
        Bar(row["name"], times_better(row), _goal_times(row), row.get("section", ""))
        for row in rows
        if _has_peer(row)
    ]
    plot = f"<figure>{bars(drawn)}</figure>\n" if drawn else ""
    table = _table(heads, cells)
    if not drawn:
        return table
    return f"{plot}<details><summary>All {len(rows)} figures</summary>\n{table}</details>"


def _has_peer(row: Mapping[str, Any]) -> bool:
    """Return whether a figure stands beside a peer's, not beside its goal."""
    is_alone = row["bounded"] and row["peer"] == row["goal"]
    return bool(row["peer"] and row["ours"] and not is_alone)


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['section']}: {row['name']}" if "section" in row else str(row["name"])


def times_better(row: Mapping[str, Any]) -> float:
    """Above 1: ours is ahead, whichever way its ratio is counted."""
    ratio = float(row["ratio"])
    return 1 / ratio if row["lower"] else ratio


def _goal_times(row: Mapping[str, Any]) -> float:
    """The goal in the same sense; 0 where it is none of the ratio's."""
    goal = float(row["goal"])
    if row["bounded"] or not goal:
        return 0.0
    return 1 / goal if row["lower"] else goal


def _goal(row: Mapping[str, Any]) -> str:
    if not row["goal"]:
        return ""
    if row["bounded"]:
        return f"{'≤' if row['lower'] else '≥'} {_figure(row['goal'])} {row['unit']}"
    return f"≥ {factor(_goal_times(row))}"


def _ahead(row: Mapping[str, Any]) -> str:
    return factor(times_better(row)) if _has_peer(row) else ""


LEGEND = {
    "right": "var(--c2)",
    "wrong, and said so": "var(--c4)",
    "wrong without a word": "#c2362b",
}


FAULT_COLUMNS = {
    **dict(zip(("right", "said", "wrong"), LEGEND, strict=True)),
    "with_ghosts": "wrong, with ghosts",
    "doubted": "right, but doubted: false alarms",
    "warned": "right, with a warning in its log",
}


def _faults(found: Mapping[str, Any]) -> str:
    missing = "".join(
        f"<p>Not here: {escape(name)}: {escape(why)}</p>"
        for name, why in found["unavailable"].items()
    )
    totals = found["totals"]
    cells = [(name, *(str(t[word]) for word in FAULT_COLUMNS)) for name, t in totals.items()]
    legend = "".join(
        f'<span><span class="swatch" style="background:{colour}"></span>{name}</span>'
        for name, colour in LEGEND.items()
    )
    heads = ("", *FAULT_COLUMNS.values())
    plot = f'<figure>{shares(totals)}<div class="legend">{legend}</div></figure>'
    return f"{missing}{plot}\n{_table(heads, cells)}"


REPLAYED = {
    "TTFT mean (s)": "ttft_mean_s", "median": "ttft_median_s", "p99": "ttft_p99_s",
    "end to end mean (s)": "e2e_mean_s", "per output token (s)": "tpot_mean_s",
    "hit rate": "hit_rate",
}  # fmt: skip


def _replays(runs: Sequence[Mapping[str, Any]]) -> str:
    ours, *others = runs
    beside = [Bar(run["policy"], run["ttft_mean_s"] / ours["ttft_mean_s"]) for run in others]
    cells = [(run["policy"], *(_figure(run[field]) for field in REPLAYED.values())) for run in runs]
    note = (
        f'<p class="muted">Mean time to first token of each, by that of {ours["policy"]}: the same '
        "fleet, requests and clock, another policy.</p>"
    )
    return f"{note}<figure>{bars(beside)}</figure>\n{_table(('', *REPLAYED), cells)}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    table = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>"
    return f'<div class="wide"><table>\n{table}</table></div>'


def _cell(text: str) -> str:
    style = ' class="no"' if text == NO else ""
    return f"<td{style}>{escape(text)}</td>"


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
