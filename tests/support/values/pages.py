"""Console blocks of pages, as scripts."""

import re
from typing import NamedTuple

BLOCK = re.compile(
    r"(?:^<!-- elsewhere: (?P<elsewhere>\S+) -->\n)?^```console\n(?P<text>.*?)^```", re.M | re.S
)


class Command(NamedTuple):
    """What follows a prompt, with the lines that continue it."""

    text: str
    elsewhere: str | None
    """The file that tests it, where it is not run here."""

    shown: str = ""
    """What the page says it answers."""

    @property
    def is_refused(self):
        return "# refused" in self.text

    def missed(self, said):
        """What the page shows, and is not in what was said: keys of JSON, or all but numbers."""
        if keys := re.findall(r'"(\w+)":', self.shown):
            return [key for key in keys if f'"{key}"' not in said]
        shown = " ".join(self.shown.split())
        parts = re.split(r"(\s+|…|[\d.]*\d)", shown)
        wild = {"…": ".*", " ": r"\s+"}
        pattern = "".join(
            wild.get(part, re.escape(part)) if not i % 2 or part in wild else r"[\d.]+"
            for i, part in enumerate(parts)
        )
        return [] if re.search(pattern, said, re.S) else [shown]


def commands(page):
    """In order."""
    for block in BLOCK.finditer(page):
        for text in re.findall(r"^\$ (.*?)(?=^\$ |\Z)", block["text"], re.M | re.S):
            command, shown = _without_output(text)
            yield Command(command, block["elsewhere"], shown)


def _without_output(text):
    """Lines as long as the shell would go on reading; and the rest."""
    lines = text.splitlines()
    read = lines.pop(0)
    while lines and (read.endswith("\\") or read.count("'") % 2):
        read += "\n" + lines.pop(0)
    return read, "\n".join(lines)


def script(page):
    """One that ends at the first command with another status than the page says, and leaves what
    each said in a file of its number.
    """
    lines = ["set -o pipefail", 'curl() { command curl --fail-with-body "$@"; }']
    for number, command in enumerate(commands(page)):
        if command.elsewhere is None:
            wanted = "-ne 0" if command.is_refused else "-eq 0"
            told = f"echo 'command {number} of the page' >&2"
            lines += [f"{{ {command.text}", f"}} > said-{number} 2>&1"]
            lines += [f"[ $? {wanted} ] || {{ cat said-{number} >&2; {told}; exit 9; }}"]
    return "\n".join(lines)
