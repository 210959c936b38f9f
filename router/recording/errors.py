"""A recording that cannot be read, or not further; part of the tree in `router.errors`."""

from typing import Literal, TypeAlias

from router.errors import KvRouterError

RecordingProblem: TypeAlias = Literal[
    "empty", "foreign", "version", "damaged", "cut off", "too long"
]


class RecordingError(KvRouterError):
    """A recording cannot be read, or not behind some line. `problem` says why in a word or two."""

    code = "recording"

    def __init__(self, problem: RecordingProblem, line: int, detail: str) -> None:
        super().__init__(f"line {line}: {detail}")
        self.problem = problem
        self.line = line
        self.detail = detail
