"""Whether tokenizers and engines agree, by model and kind of prompt: pure."""

from collections.abc import Collection, Iterator, Mapping
from typing import Literal, TypeAlias

from msgspec import Struct

from router.forward.tokenizer.chats import KINDS, Kind

Outcome: TypeAlias = Literal["agrees", "differs", "untold"]
"""`untold`: the engine has no `/tokenize`, or none for us."""

Standing: TypeAlias = Literal["agrees", "differs", "unverified", "unchecked"]
"""Of a model's tokenizer. `unverified`: no engine says its tokens, so there is no other word for
them, and usage alone can prove it wrong; `unchecked`: none was asked yet."""

BELIEVED: frozenset[Standing] = frozenset(("agrees", "unverified"))


class Verdict(Struct, frozen=True):
    """Of one engine on one kind of prompt; `why`: what differs, or why nothing is told."""

    outcome: Outcome
    why: str = ""


class Found(Struct, frozen=True):
    """What was found of a worker. `block_sizes`: that of routers, and its engine's own if it says
    another.
    """

    model: str
    verdicts: Mapping[Kind, Verdict]
    block_sizes: tuple[int, int] | None = None


class Checks:
    """What was found of every worker that is there."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[int, Found] = {}

    def note(self, worker_id: int, found: Found) -> bool:
        """Keep it; whether it is news."""
        is_news = self._found.get(worker_id) != found
        self._found[worker_id] = found
        return is_news

    def keep(self, worker_ids: Collection[int]) -> None:
        """Forget all others: they are gone."""
        for worker_id in self._found.keys() - set(worker_ids):
            del self._found[worker_id]

    def standing(self, model: str, kind: Kind) -> Standing:
        """How a model's tokenizer stands with those who serve it: one that differs is enough."""
        outcomes = {
            found.verdicts[kind].outcome
            for found in self._found.values()
            if found.model == model and kind in found.verdicts
        }
        if "differs" in outcomes:
            return "differs"
        if "agrees" in outcomes:
            return "agrees"
        return "unverified" if outcomes else "unchecked"

    def believed(self, model: str) -> frozenset[Kind]:
        """Kinds of prompts of which the tokenizer's word is taken."""
        return frozenset(kind for kind in KINDS if self.standing(model, kind) in BELIEVED)

    def counts(self) -> Mapping[tuple[str, Kind, Outcome], int]:
        """How many workers found what."""
        counts: dict[tuple[str, Kind, Outcome], int] = {}
        for found in self._found.values():
            for kind, verdict in found.verdicts.items():
                key = (found.model, kind, verdict.outcome)
                counts[key] = counts.get(key, 0) + 1
        return counts

    def mismatched_block_sizes(self) -> Iterator[tuple[int, int, int]]:
        """Of each worker where they differ: its id, the routers', its own."""
        for worker_id, found in sorted(self._found.items()):
            if found.block_sizes is not None:
                yield worker_id, *found.block_sizes

    def problems(self) -> list[str]:
        """Everything that differs, in sentences."""
        told = [
            f"worker {worker_id} of {found.model!r}: {kind}: {verdict.why}"
            for worker_id, found in sorted(self._found.items())
            for kind, verdict in found.verdicts.items()
            if verdict.outcome == "differs"
        ]
        return told + [
            f"worker {worker_id}: blocks of {ours} tokens for routers, of {own} in the engine"
            for worker_id, ours, own in self.mismatched_block_sizes()
        ]
