"""A kept index that cannot be used; part of the tree in `router.errors`."""

from typing import Literal, TypeAlias

from router.errors import KvRouterError

SnapshotProblem: TypeAlias = Literal[
    "foreign", "version", "damaged", "malformed", "torn", "too large", "other stream", "slow"
]


class SnapshotError(KvRouterError):
    """A snapshot of an index that can not be used; `problem` says why in a word or two."""

    code = "snapshot"

    def __init__(self, problem: SnapshotProblem, detail: str) -> None:
        super().__init__(f"unusable snapshot ({problem}): {detail}")
        self.problem = problem
        self.detail = detail
