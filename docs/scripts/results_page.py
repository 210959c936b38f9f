"""benchmarks/results/README.md: every result that is kept, with where and when it was measured."""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from figures import RESULTS, ROOT, read

HEAD = """# Results

Every figure of the documentation comes from these files, which benchmarks write (`--write`). `goal` is what the project aims
at, of the ratio or, where it has a unit, of our own figure. **Bold** misses it. Compare ratios: machines and hours differ.
"""
MEASURED: Mapping[str, Sequence[str]] = {
    "conformance": ("router/core", "router/indexer", "router/ingest", "router/publisher"),
    "connector": ("worker_agent/connector", "worker_agent/sharing", "worker_agent/transfer"),
    "dashboard": ("router/dashboard",),
    "decision": ("router/core", "router/scheduler", "router/sequence", "router/indexer"),
    "engine_cache": ("worker_agent/connector", "worker_agent/tiers", "worker_agent/transfer"),
    "forward": ("router/forward", "router/core", "router/runtime"),
    "index": ("router/indexer",),
    "placement": ("router", "worker_agent"),
    "published": ("router/simulator", "router/scheduler", "router/sequence"),
    "rates": ("router/publisher/engine_metrics", "router/scheduler/predictor"),
    "replay": ("router/simulator", "router/scheduler", "router/sequence"),
    "scheduling": ("router/simulator", "router/scheduler", "router/sequence"),
    "service-cycle": ("router/api", "router/core", "router/runtime"),
    "startup": ("router",),
}
"""The code that a result measures; `router` if it is not here."""


def page() -> str:
    """Return the page."""
    return "\n".join([HEAD, *(_result(name) for name in results())])


def results() -> list[str]:
    """Return the names of all results with sections of rows."""
    names = sorted(path.stem for path in RESULTS.glob("*.json"))
    return [name for name in names if _is_of_sections(name)]


def _is_of_sections(name: str) -> bool:
    found = read(name)
    return isinstance(found, dict) and all(
        isinstance(each, dict) and "rows" in each for each in found.values()
    )


def _result(name: str) -> str:
    sections = read(name)
    parts = [f"## {name}\n"]
    for section, found in sections.items():
        facts = "; ".join(
            f"{key} {value}" for key, value in found.items() if key != "rows" and value is not None
        )
        head = "| | ours | beside it | unit | ratio | goal |\n|---|---|---|---|---|---|"
        parts.append(
            "\n".join([f"### {name}: {section}\n", f"{facts}.\n", head, *_rows(found["rows"]), ""])
        )
    return "\n".join(parts)


def _rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        mark = "" if row["holds"] else "**"
        ratio = f"{row['ratio']:.3f}" + (f" ± {row['error']:.3f}" if row["error"] else "")
        sign = "≤" if row["lower"] else "≥"
        goal = "" if not row["goal"] else f"{sign} {row['goal']:,g}"
        unit = f" {row['unit']}" if row["bounded"] and goal else ""
        note = f" ({row['note']})" if row.get("note") else ""
        yield (
            f"| {row['name']}{note} | {mark}{_figure(row['ours'])}{mark} | {_figure(row['peer'])} | "
            f"{row['unit']} | {ratio} | {goal}{unit} |"
        )


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def behind() -> Iterator[str]:
    """Yield a line for each section that is older than the code that it measures."""
    for name, sections in {**{name: read(name) for name in results()}, **_whole()}.items():
        by_commit: dict[str, list[str]] = {}
        for section, found in sections.items():
            by_commit.setdefault(found["commit"], []).append(section)
        for commit, of in by_commit.items():
            if changes := _changes_since(commit.rstrip("+"), MEASURED.get(name, ("router",))):
                yield f"{name} ({', '.join(of)}): measured at {commit}, {changes}"


def _whole() -> Mapping[str, Mapping[str, Any]]:
    """Return results that have a page of their own, as one section each."""
    return {"conformance": {"measured": read("conformance")["measured"]}}


def _changes_since(commit: str, paths: Sequence[str]) -> str:
    """Return how often the code was changed since a commit; empty if it was not."""
    command = ["git", "rev-list", "--count", f"{commit}..HEAD", "--", *paths]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if shown.returncode:
        return "which is not in this history"
    count = int(shown.stdout)
    return f"{count} commits ago in {', '.join(paths)}" if count else ""
