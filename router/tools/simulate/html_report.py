"""A report as a self-contained HTML file without scripts, in light and dark colours."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files

from router.simulator import summary
from router.simulator.outcomes import RequestResults
from router.simulator.summary import Curve
from router.tools.simulate.summary_table import COLUMNS, Column, Result
from router.tools.simulate.svg_plot import Axis, Plot, legend_key, svg

_EXPLAINED = (
    "Means over the seeds; small: times the first policy's. Bold: the best of its column. "
    "Hit rate: prompt tokens that engines reused, of all. Load spread: standard deviation of the "
    "workers' busy seconds, by their mean. Plots show the first seed."
)


def html_report(title: str, facts: Mapping[str, str], results: Sequence[Result]) -> str:
    """Return the page; `facts` describe the simulation. Results are grouped by speed."""
    style = files("router.tools.simulate").joinpath("html_report.css").read_text()
    speeds = list(dict.fromkeys(result.arrival_speed for result in results))
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>",
            f'<h1>{escape(title)}</h1>\n<p class="muted">{_EXPLAINED}</p>',
            *(_section(speed, _at(speed, results)) for speed in speeds),
            f"<h2>What was simulated</h2>\n{_facts(facts)}\n</body>\n</html>\n",
        ]
    )


def _at(arrival_speed: float, results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.arrival_speed == arrival_speed]


def _section(arrival_speed: float, results: Sequence[Result]) -> str:
    plots = "\n".join(_figure(plot) for plot in _plots(results))
    keys = "".join(
        f"<span>{legend_key(i)}{escape(result.policy)}</span>" for i, result in enumerate(results)
    )
    return (
        f"<h2>Arrival speed {arrival_speed:g}</h2>\n{_table(results)}\n"
        f'<div class="legend">{keys}</div>\n<div class="plots">\n{plots}\n</div>'
    )


def _figure(plot: Plot) -> str:
    return f"<figure>\n<h3>{escape(plot.title)}</h3>\n{svg(plot)}\n</figure>"


def _facts(facts: Mapping[str, str]) -> str:
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    return "<dl>" + "".join(rows) + "</dl>"


def _table(results: Sequence[Result]) -> str:
    heads = "".join(f"<th>{escape(column.head)}</th>" for column in COLUMNS)
    rows = "\n".join(_row(result, results) for result in results)
    return (
        f'<div class="wide"><table>\n<thead><tr><th>policy</th>{heads}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table></div>"
    )


def _row(result: Result, results: Sequence[Result]) -> str:
    cells = "".join(_cell(column, result, results) for column in COLUMNS)
    return f"<tr><td>{escape(result.policy)}</td>{cells}</tr>"


def _cell(column: Column, result: Result, results: Sequence[Result]) -> str:
    value, first = result.mean(column.field), results[0].mean(column.field)
    values = [each.mean(column.field) for each in results]
    best = max(values) if column.is_better_higher else min(values)
    style = ' class="best"' if value == best and len(set(values)) > 1 else ""
    ratio = "" if result is results[0] or not first else f"<small>{value / first:.2f}</small>"
    return f"<td{style}>{column.write(value)}{ratio}</td>"


def _plots(results: Sequence[Result]) -> list[Plot]:
    named = [(result.policy, result.outcomes) for result in results]
    return [*_distributions(named), *_over_time(named)]


def _distributions(named: Sequence[tuple[str, RequestResults]]) -> list[Plot]:
    seconds = Axis("seconds", _short, is_logarithmic=True)
    fraction = Axis("", _whole_percent, starts_at_zero=True)
    return [
        Plot(
            "Time to first token: requests served within",
            seconds,
            fraction,
            [(name, summary.distribution(outcomes.ttft_s)) for name, outcomes in named],
        ),
        Plot(
            "Inter-token latency: tokens that take longer",
            seconds,
            Axis("", _short_percent, is_logarithmic=True),
            [(name, summary.longer_gaps(outcomes)) for name, outcomes in named],
        ),
    ]


def _over_time(named: Sequence[tuple[str, RequestResults]]) -> list[Plot]:
    """Return the plots over time, in minutes, or in seconds for a short simulation."""
    last_s = max(float(outcomes.sampled_s[-1]) for _, outcomes in named)
    unit, unit_s = ("minutes", 60.0) if last_s > 600 else ("seconds", 1.0)
    time = Axis(f"{unit} since the start", _short, starts_at_zero=True)

    def plot(
        title: str, of: Callable[[RequestResults], Curve], write: Callable[[float], str]
    ) -> Plot:
        lines = [(name, of(outcomes)) for name, outcomes in named]
        shown = [(name, (x / unit_s, y)) for name, (x, y) in lines]
        return Plot(title, time, Axis("", write, starts_at_zero=True), shown)

    return [
        plot("Mean time to first token (s), by arrival", summary.ttft_over_time, _short),
        plot("Hit rate, by arrival", summary.hit_rate_over_time, _whole_percent),
        plot("Load spread between workers", summary.load_spread_over_time, _whole_percent),
    ]


def _short(value: float) -> str:
    return f"{value:g}"


def _short_percent(fraction: float) -> str:
    return f"{fraction * 100:g}%"


def _whole_percent(fraction: float) -> str:
    return f"{fraction:.0%}"
