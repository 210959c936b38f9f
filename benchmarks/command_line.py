"""The command line that benchmarks in sections share; needs nothing but Python."""

import argparse
from collections.abc import Collection


def section_parser(
    doc: str, sections: Collection[str], *, keeps: bool = True
) -> argparse.ArgumentParser:
    """Return a parser of `--quick`, `--json`, and `--only` with names of sections, by default all.

    `keeps`: it has `--write` as well, for `report`.
    """

    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen) - set(sections):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
        return chosen

    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes, within 45 s")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    if keeps:
        parser.add_argument("--write", action="store_true", help="keep the rows in results/")
    parser.add_argument("--only", type=names, default=list(sections), help=",".join(sections))
    return parser
