"""Findings for people and for programs."""

import textwrap
from collections import Counter
from collections.abc import Sequence

import msgspec

from router.tools.doctor.attachment import Attachment
from router.tools.doctor.findings import Finding, Verdict, has_wrong

_WIDTH = 100
_INDENT = " " * 10


def text_report(findings: Sequence[Finding], how: Attachment | None) -> str:
    """One line a check; below those that are not well, why that matters and how to mend it."""
    lines = [line for finding in findings for line in _lines(finding)]
    counts = Counter(finding.verdict for finding in findings)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    lines += ["", summary]
    if how is not None:
        lines += ["", "attach it to a router:", f"  {how.curl}"]
        lines += ["", "or by an agent beside it:", f"  {how.agent}"]
    return "\n".join(lines)


def json_report(findings: Sequence[Finding], how: Attachment | None) -> str:
    """The same, as one JSON object."""
    value = {
        "is_well": not has_wrong(findings),
        "findings": findings,
        "worker": None if how is None else how.worker,
        "agent": None if how is None else how.agent,
    }
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _lines(finding: Finding) -> list[str]:
    lines = [f"{finding.verdict:<8}  {finding.check}: {finding.text}"]
    for word, said in (("why", finding.why), ("fix", finding.fix)):
        if said:
            lines += textwrap.wrap(
                f"{word}: {said}",
                _WIDTH,
                initial_indent=_INDENT,
                subsequent_indent=f"{_INDENT}     ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return lines
