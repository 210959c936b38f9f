"""Everything in the documentation that is made from the source: `make docs` writes it anew.

    PYTHONPATH=.:benchmarks:docs/scripts python docs/scripts/made.py

A whole file, from a template with figures (`figures`) or by a function; or in any other file, or a
template, what stands between `<!-- made: NAME -->` and `<!-- end -->`. A test holds all of it in step. Results
that are older than the code they measure are listed.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import figures
import licences
import pictures
import policy_settings
import report_plots
import results_page
import security_tables
import settings_page
import wire_reference

ROOT = Path(__file__).parents[2]

DRAWN = {**pictures.PICTURES, **report_plots.PLOTS}
WHOLE: Mapping[str, Callable[[], str]] = {
    "THIRD_PARTY.md": licences.third_party,
    "docs/settings.md": settings_page.page,
    "docs/wire.md": wire_reference.wire,
    "benchmarks/results/README.md": results_page.page,
    **{path: partial(figures.document, path) for path in figures.templates()},
    **{f"docs/pictures/{name}.svg": make for name, make in DRAWN.items()},
}
"""Files by path."""

SECTIONS: Mapping[tuple[str, str], Callable[[], str]] = {
    ("SECURITY.md", "routes"): security_tables.routes,
    ("docs/routing.md", "policy settings"): policy_settings.table,
}
"""Parts of files by path and name."""


def as_made(path: str) -> str:
    """Return the content that the file should have."""
    text = WHOLE[path]() if path in WHOLE else (ROOT / path).read_text()
    for (file, name), make in SECTIONS.items():
        if file == path:
            text = _with_section(text, name, make())
    return text


def _with_section(text: str, name: str, content: str) -> str:
    head, start, rest = text.partition(f"<!-- made: {name} -->\n")
    _, end, tail = rest.partition("<!-- end -->")
    assert end, f"no section {name}"
    return "".join([head, start, content, end, tail])


PATHS = sorted({*WHOLE, *(path for path, _ in SECTIONS)})


def main() -> None:
    for path in PATHS:
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(as_made(path))
    for line in results_page.behind():
        print(line)


if __name__ == "__main__":
    main()
