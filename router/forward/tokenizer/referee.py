"""Whether engines confirm the chats that are made of Messages and Responses. Pure."""

from typing import Literal, TypeAlias

from router.forward.apis.chats.chat_form import ChatForm
from router.forward.request_body import CompletionRequest

EVERY = 100
"""One of this number of prompts is counted by its engine, after the first one."""

MOST_KEYS = 4096

RefereeKey: TypeAlias = tuple[str, str, frozenset[str]]
"""Model, path and features of a request: what is true of one holds for all alike."""

Verdict: TypeAlias = Literal["agrees", "differs"]


class Referee:
    """The last verdict on requests of each model, API and set of features.

    Beyond `MOST_KEYS` all are dropped: then engines are asked again.
    """

    __slots__ = ("_asked", "_verdicts")

    def __init__(self) -> None:
        self._verdicts: dict[RefereeKey, Verdict] = {}
        self._asked: dict[RefereeKey, int] = {}

    def is_due(self, key: RefereeKey) -> bool:
        """Return whether an engine is to count this prompt: the first one, then 1 in `EVERY`."""
        if len(self._asked) >= MOST_KEYS:
            self._asked.clear()
            self._verdicts.clear()
        number = self._asked.get(key, 0)
        self._asked[key] = number + 1
        return number % EVERY == 0

    def verdict(self, key: RefereeKey) -> Verdict | None:
        """Return the last verdict, or None."""
        return self._verdicts.get(key)

    def note(self, key: RefereeKey, *, agrees: bool) -> bool:
        """Record a verdict. Returns whether it is the first one that differs."""
        before = self._verdicts.get(key)
        self._verdicts[key] = "agrees" if agrees else "differs"
        return not agrees and before != "differs"

    def is_trusted(self, key: RefereeKey, *, is_proven: bool) -> bool:
        """Return whether prompts are believed: confirmed, or known to be right and not denied."""
        verdict = self._verdicts.get(key)
        return is_proven if verdict is None else verdict == "agrees"

    def problems(self) -> list[str]:
        """Return the requests that engines count otherwise, one sentence each."""
        return [
            f"{model}: {path}{with_(features)}: the engine counts other tokens"
            for (model, path, features), verdict in sorted(
                self._verdicts.items(), key=lambda item: (item[0][0], item[0][1])
            )
            if verdict == "differs"
        ]


def referee_key(asked: CompletionRequest, form: ChatForm) -> RefereeKey:
    """Return under which name the verdict on a request is kept."""
    return asked.model, asked.path, form.features


def with_(features: frozenset[str]) -> str:
    """Return features in words."""
    return f" with {', '.join(sorted(features))}" if features else ""
