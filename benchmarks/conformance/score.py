"""Answers against the truth."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from .steps import Prompt
from .systems.base import Answer


class Compared(Struct, frozen=True):
    """One answer. `ghosts`: blocks credited and not held; `missing`: held and not credited.

    `said`: the words in which the system doubts every count that is wrong; empty if it vouches for
    one of them. `counts`: what it answered, for people. `problem`: why it did not.
    `is_doubted`: it does not vouch for one of the counts, be they right or wrong.
    """

    counts: tuple[int | None, ...]
    ghosts: int
    missing: int
    said: str = ""
    problem: str = ""
    is_doubted: bool = False

    @property
    def is_right(self) -> bool:
        return not (self.ghosts or self.missing or self.problem)

    @property
    def is_certain(self) -> bool:
        """Right, and vouched for."""
        return self.is_right and not self.is_doubted


class Question(Struct, frozen=True):
    """What was asked, what is true, and what a system said in the end."""

    prompt: Prompt
    truth: tuple[int, ...]
    compared: Compared


class Cell(Struct, frozen=True):
    """One system in one scenario."""

    questions: tuple[Question, ...] = ()

    def after(self, questions: Sequence[Question]) -> "Cell":
        """With more of them."""
        return Cell((*self.questions, *questions))

    @property
    def wrong(self) -> list[Compared]:
        return [q.compared for q in self.questions if not q.compared.is_right]

    @property
    def ghosts(self) -> int:
        return sum(compared.ghosts for compared in self.wrong)

    @property
    def missing(self) -> int:
        return sum(compared.missing for compared in self.wrong)

    @property
    def is_right(self) -> bool:
        return not self.wrong

    @property
    def is_certain(self) -> bool:
        """All of it right, and vouched for."""
        return all(question.compared.is_certain for question in self.questions)

    @property
    def said(self) -> str:
        """Its doubts, if it doubted every wrong answer."""
        doubts = [compared.said for compared in self.wrong]
        return ", ".join(dict.fromkeys(doubts)) if all(doubts) else ""

    @property
    def problem(self) -> str:
        """Why it did not answer, if it did not."""
        return next((c.problem for c in self.wrong if c.problem), "")


def compare(
    answer: Answer, worker_ids: Sequence[int], truth: Sequence[int], best_only: bool
) -> Compared:
    """An answer for workers whose truth is known.

    Of a system that shows only its choice the others are not known; but had it credited one of
    them more than its choice, it would have chosen that.
    """
    held = dict(zip(worker_ids, truth, strict=True))
    credited = {worker: answer.blocks.get(worker) for worker in worker_ids}
    if best_only:
        off = _off_of_choice(answer.blocks, held)
    else:
        off = {worker: (credited[worker] or 0) - held[worker] for worker in worker_ids}
    wrong = [worker for worker, difference in off.items() if difference]
    doubts = [answer.doubts.get(worker, "") for worker in wrong]
    return Compared(
        counts=tuple(credited.values()),
        ghosts=sum(difference for difference in off.values() if difference > 0),
        missing=-sum(difference for difference in off.values() if difference < 0),
        said=", ".join(dict.fromkeys(doubts)) if all(doubts) else "",
        is_doubted=any(answer.doubts.get(worker) for worker in worker_ids),
    )


def failed(truth: Sequence[int], problem: str) -> Compared:
    """No answer: nothing is credited to anybody."""
    return Compared((None,) * len(truth), 0, sum(truth), problem=problem)


def _off_of_choice(credited: Mapping[int, int], held: Mapping[int, int]) -> dict[int, int]:
    off = {worker: blocks - held[worker] for worker, blocks in credited.items()}
    best = max(held, key=lambda worker: held[worker])
    if best not in credited and held[best] > max(credited.values()):
        off[best] = max(credited.values()) - held[best]
    return off
