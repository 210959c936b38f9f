"""What the doctor says: one finding a check."""

import enum
from collections.abc import Sequence

from msgspec import Struct


class Verdict(enum.StrEnum):
    """Of one check. `unknown`: nothing came that could tell."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"
    UNKNOWN = "unknown"


class Finding(Struct, frozen=True, omit_defaults=True):
    """One check: what was found, and, where it is not well, why that matters and how to mend it."""

    check: str
    verdict: Verdict
    text: str
    why: str = ""
    fix: str = ""


def ok(check: str, text: str) -> Finding:
    """All is well."""
    return Finding(check, Verdict.OK, text)


def warning(check: str, text: str, why: str = "", fix: str = "") -> Finding:
    """It works, and costs something."""
    return Finding(check, Verdict.WARNING, text, why, fix)


def wrong(check: str, text: str, why: str, fix: str) -> Finding:
    """It does not work."""
    return Finding(check, Verdict.WRONG, text, why, fix)


def unknown(check: str, text: str, fix: str = "") -> Finding:
    """Nothing came that could tell; `fix`: how to find out."""
    return Finding(check, Verdict.UNKNOWN, text, "", fix)


def has_wrong(findings: Sequence[Finding]) -> bool:
    """Is anything wrong?"""
    return any(finding.verdict is Verdict.WRONG for finding in findings)
