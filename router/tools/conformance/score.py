"""Answers compared with the truth."""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from msgspec import Struct

from router.tools.conformance.steps import Prompt
from router.tools.conformance.systems.base import Answer


class Mark(Enum):
    """The result of a system in a scenario, or in all scenarios of one cause."""

    RIGHT = "✓"
    SAID = "◐"
    WRONG = "✗"


class Compared(Struct, frozen=True):
    """One answer. `ghosts`: blocks credited and not held; `missing`: held and not credited.

    `said`: the words in which the system doubts every count that is wrong; empty if it vouches for
    one of them. `counts`: its answer. `problem`: the reason why there is none. `is_doubted`: it
    does not vouch for one of the counts, be they right or wrong.
    """

    counts: tuple[int | None, ...]
    ghosts: int
    missing: int
    said: str = ""
    problem: str = ""
    is_doubted: bool = False

    @property
    def is_right(self) -> bool:
        """True if all counts are right."""
        return not (self.ghosts or self.missing or self.problem)

    @property
    def is_certain(self) -> bool:
        """True if all counts are right, and vouched for."""
        return self.is_right and not self.is_doubted


class Question(Struct, frozen=True):
    """A prompt, the truth, and the last answer of a system."""

    prompt: Prompt
    truth: tuple[int, ...]
    compared: Compared


class Cell(Struct, frozen=True):
    """One system in one scenario. `remarks`: warnings of its log about the scenario's engines."""

    questions: tuple[Question, ...] = ()
    remarks: tuple[str, ...] = ()

    def after(self, questions: Sequence[Question]) -> "Cell":
        """Return the cell with more questions."""
        return Cell((*self.questions, *questions), self.remarks)

    @property
    def wrong(self) -> list[Compared]:
        """The answers that are wrong."""
        return [q.compared for q in self.questions if not q.compared.is_right]

    @property
    def ghosts(self) -> int:
        """Blocks credited and not held, in all answers."""
        return sum(compared.ghosts for compared in self.wrong)

    @property
    def missing(self) -> int:
        """Blocks held and not credited, in all answers."""
        return sum(compared.missing for compared in self.wrong)

    @property
    def is_certain(self) -> bool:
        """True if all answers are right, and vouched for."""
        return all(question.compared.is_certain for question in self.questions)

    @property
    def said(self) -> str:
        """The doubts about its wrong answers, of its API or else of its log; empty without any."""
        doubts = [compared.said for compared in self.wrong]
        if doubts and all(doubts):
            return ", ".join(dict.fromkeys(doubts))
        return "in its log" if doubts and self.remarks else ""

    @property
    def problem(self) -> str:
        """The reason why it did not answer, if it did not."""
        return next((c.problem for c in self.wrong if c.problem), "")

    @property
    def mark(self) -> Mark:
        """The result."""
        if not self.wrong:
            return Mark.RIGHT
        return Mark.SAID if self.said else Mark.WRONG

    @property
    def is_false_alarm(self) -> bool:
        """True if all answers are right, and one of them is doubted by the API."""
        return self.mark is Mark.RIGHT and not self.is_certain

    @property
    def is_false_warning(self) -> bool:
        """True if all answers are right, and the log warns."""
        return self.mark is Mark.RIGHT and bool(self.remarks)


class Score(Struct, frozen=True):
    """A system over many causes, or many scenarios.

    `right`, `said` and `wrong` add up to their number. `doubted`: right ones that its API doubts;
    `warned`: right ones about which its log warns; `with_ghosts`: those with blocks credited that
    the engine does not hold.
    """

    right: int
    said: int
    wrong: int
    doubted: int
    warned: int
    with_ghosts: int

    @property
    def count(self) -> int:
        """The number of causes or scenarios."""
        return self.right + self.said + self.wrong


def scored(groups: Iterable[Sequence[Cell]]) -> Score:
    """Return the score of groups of cells, each of which counts once."""
    cells = list(groups)
    marks = [joint_mark(each) for each in cells]
    right = [each for each, mark in zip(cells, marks, strict=True) if mark is Mark.RIGHT]
    return Score(
        right=marks.count(Mark.RIGHT),
        said=marks.count(Mark.SAID),
        wrong=marks.count(Mark.WRONG),
        doubted=sum(any(cell.is_false_alarm for cell in each) for each in right),
        warned=sum(any(cell.is_false_warning for cell in each) for each in right),
        with_ghosts=sum(any(cell.ghosts for cell in each) for each in cells),
    )


def joint_mark(cells: Sequence[Cell]) -> Mark:
    """Return the worst result of several cells."""
    marks = {cell.mark for cell in cells}
    return next((m for m in (Mark.WRONG, Mark.SAID) if m in marks), Mark.RIGHT)


def compare(
    answer: Answer, worker_ids: Sequence[int], truth: Sequence[int], best_only: bool
) -> Compared:
    """Compare an answer for workers with the truth about them.

    `best_only`: the answer has the chosen worker alone. The others are unknown, but a system that
    credited one of them more than its choice would have chosen that.
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
    """Return the result of a question without an answer: no blocks are credited."""
    return Compared((None,) * len(truth), 0, sum(truth), problem=problem)


def _off_of_choice(credited: Mapping[int, int], held: Mapping[int, int]) -> dict[int, int]:
    off = {worker: blocks - held[worker] for worker, blocks in credited.items()}
    best = max(held, key=lambda worker: held[worker])
    if best not in credited and held[best] > max(credited.values()):
        off[best] = max(credited.values()) - held[best]
    return off
