"""Plots of docs/report.md, from results that are committed."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from compare_page import times_better
from compare_plots import Bar, bars
from figures import SYSTEMS, Counts, read
from svg import Picture

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1b1f24 } .end { text-anchor: end }
.head { font-weight: 600 } .tick { font-size: 11px; fill: #57606a; text-anchor: middle }
.bar { fill: #2f7d46 } .worse { fill: #b42318 } .grid { stroke: #d0d7de } .one { stroke: #57606a }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .tick { fill: #9da7b1 } .bar { fill: #4cae6b } .worse { fill: #f0695e }
  .grid { stroke: #30363d } .one { stroke: #9da7b1 }
}
"""
Chosen = tuple[str, str, str, str, str]
"""Heading, name in the plot, result, section, and the row's name; `*` stands for anything."""

COSTS: Sequence[Chosen] = (
    ("over HTTP, beside Dynamo", "cycle, 512 tokens", "service-cycle", "cycle", "512, 16 at once"),
    ("over HTTP, beside Dynamo", "8,192", "service-cycle", "cycle", "8192, 16 at once"),
    ("over HTTP, beside Dynamo", "100,000", "service-cycle", "cycle", "100000, 16 at once"),
    ("over HTTP, beside Dynamo", "by httpx, processor", "service-cycle", "httpx", "*of a core"),
    ("the endpoint", "beside vllm-router, rate", "forward", "rate", "*of a core"),
    ("the endpoint", "beside smg, added time", "forward", "text", "beside smg"),
    (
        "in process, beside Dynamo",
        "choose, 8,192, tokens",
        "decision",
        "select",
        "8192, predictive",
    ),
    ("in process, beside Dynamo", "… hashes", "decision", "hashes", "8192, *16*"),
    ("in process, beside Dynamo", "2,048 ranks; its 256", "decision", "fleet", "512, predictive"),
    ("in process, beside Dynamo", "search read, 64 × 128", "index", "find", "read 64×128 median"),
    (
        "in process, beside Dynamo",
        "search read, 8,192 × 128",
        "index",
        "find",
        "read 8192×128 med*",
    ),
    ("events, beside Dynamo", "an engine's own, processor", "direct", "peer", "stored, busy"),
    ("events, beside Dynamo", "each side's own encoding", "index", "store", "16 × 128"),
    ("at rest, beside Dynamo", "memory", "startup", "memory", "serve"),
    ("at rest, beside Dynamo", "until it answers", "startup", "time", "serve"),
)
PLACEMENT: Sequence[Chosen] = (
    *(
        (
            f"the trace at speed {speed}",
            name,
            "scheduling",
            "policies",
            f"{speed} {row} ttft_mean_s",
        )
        for speed in ("1", "1.6", "2.2")
        for name, row in (
            ("best dynamo-1.6", "dynamo-1.6:*"),
            ("lmetric", "lmetric"),
            ("best cache-aware", "cache-aware:*"),
            ("round-robin", "round-robin"),
        )
    ),
    *(
        ("other engines, best rival of all", name, "scheduling", section, f"{row} ttft_mean_s")
        for name, section, row in (
            ("median of 21 fleets", "physics", "median"),
            ("metrics polled, no agent", "physics", "polled,*"),
            ("no load reported", "physics", "silent,*"),
            ("long tail, worst", "physics, earlier", "shared prompts*"),
            ("all wrong at once, polled", "physics", "everything,*"),
        )
    ),
)
KINDS = (("right", "held"), ("doubted", "warm"), ("said", "box"), ("wrong", "bad"))
NAMES = {
    "right": "right",
    "doubted": "right, doubted",
    "said": "wrong, says so",
    "wrong": "wrong, silent",
}


def exactness() -> str:
    """Draw what each system gets right in every group of scenarios."""
    groups = _groups()
    systems = list(read("conformance")["totals"])
    left, wide = 190, 600 // len(systems)
    picture = Picture(800, 74 + 26 * len(groups), "Scenarios that each router gets right, by group")
    for column, system in enumerate(systems):
        middle = left + wide * (column + 0.5)
        picture.text(middle, 16, SYSTEMS.get(system, system), "title")
    for line, (group, of_systems) in enumerate(groups.items()):
        y = 26 + 26 * line
        picture.text(left - 8, y + 15, group, "", "end")
        for column, system in enumerate(systems):
            counts, x = of_systems[system], float(left + wide * column)
            scale = (wide - 16) / max(counts.count, 1)
            for kind, style in KINDS:
                value = counts.right - counts.doubted if kind == "right" else getattr(counts, kind)
                if value:
                    picture.box(x, y, scale * value, 20, [str(value)], style)
                x += scale * value
    for number, (kind, style) in enumerate(KINDS):
        x, y = left + 150 * number, 40 + 26 * len(groups)
        picture.box(x, y, 16, 16, [""], style)
        picture.text(x + 24, y + 13, NAMES[kind], "small", "start")
    return picture.svg()


def _groups() -> dict[str, dict[str, Counts]]:
    found: dict[str, dict[str, Counts]] = {}
    for each in read("conformance")["cells"]:
        if not each.get("is_scored", not each.get("convention")):
            continue
        for system, cell in each["systems"].items():
            group = found.setdefault(each["group"], {})
            group[system] = group.get(system, Counts(0, 0, 0, 0)).plus(cell)
    return found


def costs() -> str:
    """Draw how many times better than the peer each figure is, losses as well."""
    return _standing_alone(COSTS)


def placement() -> str:
    """Draw simulated mean times to the first token beside those of other policies."""
    return _standing_alone(PLACEMENT)


def _standing_alone(chosen: Sequence[Chosen]) -> str:
    drawn = bars(list(_bars(chosen)))
    start = '<svg xmlns="http://www.w3.org/2000/svg" '
    return drawn.replace("<svg ", start, 1).replace(">", f"><style>{STYLE}</style>", 1) + "\n"


def _bars(chosen: Sequence[Chosen]) -> Iterator[Bar]:
    for heading, name, result, section, row in chosen:
        yield Bar(name, times_better(_row(result, section, row)), heading=heading)


def _row(result: str, section: str, name: str) -> dict[str, Any]:
    every = read(result)[section]["rows"]
    (found,) = (each for each in every if fnmatchcase(each["name"], name))
    return dict(found)


PLOTS = {"report-exactness": exactness, "report-costs": costs, "report-placement": placement}
