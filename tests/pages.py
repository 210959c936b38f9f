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

    @property
    def is_refused(self):
        return "# refused" in self.text


def commands(page):
    """In order."""
    for block in BLOCK.finditer(page):
        for text in re.findall(r"^\$ (.*?)(?=^\$ |\Z)", block["text"], re.M | re.S):
            yield Command(_without_output(text), block["elsewhere"])


def _without_output(text):
    """Lines as long as the shell would go on reading."""
    lines = text.splitlines()
    read = lines.pop(0)
    while lines and (read.endswith("\\") or read.count("'") % 2):
        read += "\n" + lines.pop(0)
    return read


def script(page):
    """One that ends at the first command with another status than the page says."""
    lines = ["set -o pipefail", 'curl() { command curl --fail-with-body "$@"; }']
    for number, command in enumerate(commands(page)):
        if command.elsewhere is None:
            wanted = "-ne 0" if command.is_refused else "-eq 0"
            told = f"echo 'command {number} of the page' >&2"
            lines += [command.text, f"[ $? {wanted} ] || {{ {told}; exit 9; }}"]
    return "\n".join(lines)
