"""The table of the settings of placement in docs/routing.md, and the policies that use each."""

from router.config.policy import FIELD_OF, USED_BY, PolicyConfig
from router.runtime.process.settings import settings_of


def table() -> str:
    """Return the table, in the order of `--help`."""
    rows = [
        f"| `{each.name}` | {_default(each.value)} | {_meaning(each.text)} | {_used_by(each.name)} |"
        for each in settings_of(PolicyConfig())
        if each.name in FIELD_OF
    ]
    head = ["| setting | default | meaning | used by |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def _default(value: object) -> str:
    return "not set" if value is None else str(value)


def _meaning(text: str) -> str:
    return text.rpartition("; used by ")[0]


def _used_by(name: str) -> str:
    return ", ".join(f"`{policy}`" for policy in USED_BY[name])
