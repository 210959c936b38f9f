"""Real conversations, as prompts that grow turn by turn."""

import json
from importlib.resources import files

from msgspec import Struct

MAX_TURNS = 6


class Turn(Struct, frozen=True):
    """One request: everything said so far, and the next thing said to the model."""

    conversation: str
    number: int
    prompt: str

    @property
    def token_ids(self) -> list[int]:
        """As the byte-level model reads it."""
        return list(self.prompt.encode())


def conversations() -> list[list[Turn]]:
    """The conversations that ship with this package; every one has at least two turns."""
    text = files("router.local").joinpath("conversations.json").read_text("utf-8")
    data = json.loads(text)
    return [
        _turns(each["title"], data["systems"][each["system"]], each["turns"])
        for each in data["conversations"]
    ]


def _turns(title: str, system: str, exchanges: list[dict[str, str]]) -> list[Turn]:
    said = f"{system}\n"
    turns = []
    for number, exchange in enumerate(exchanges[:MAX_TURNS], 1):
        said += f"\nUser: {exchange['user']}\nAssistant:"
        turns.append(Turn(title, number, said))
        said += f" {exchange['assistant']}"
    return turns
