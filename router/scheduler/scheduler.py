"""Who should serve a prompt: terms for every candidate, a cost for each, one choice."""

from collections.abc import Iterable, Mapping
from random import Random

from msgspec import Struct

from router.indexer.base import NO_OVERLAP, OverlapScores
from router.protocol.values import Identity, Rank
from router.scheduler.cost import Terms, dynamo_1_0
from router.scheduler.selector import select
from router.scheduler.settings import PolicySettings as PolicySettings
from router.sequence.prompt import Prompt
from router.sequence.tracker import Tracker


class Choice(Struct, frozen=True):
    """The chosen candidate, among all that were weighed; costs parallel to terms."""

    index: int
    terms: list[Terms]
    costs: list[float]
    policy: str

    @property
    def chosen(self) -> Terms:
        """Terms of the chosen candidate."""
        return self.terms[self.index]


def weigh(
    prompt: Prompt,
    candidates: Iterable[tuple[Rank, Identity]],
    overlaps: Mapping[Identity, OverlapScores],
    held_blocks: Mapping[Rank, int],
    tracker: Tracker,
) -> list[Terms]:
    """Terms of every candidate. `overlaps` has the prompt's matches under each identity in use."""
    terms = []
    for rank, identity in candidates:
        hashed = prompt.hashed(identity)
        overlap_blocks = overlaps[identity].get(rank, NO_OVERLAP).device
        projected = tracker.projected(rank, hashed, overlap_blocks)
        terms.append(
            Terms(
                rank,
                identity.block_size,
                overlap_blocks,
                hashed.cached_blocks(overlap_blocks, eagle=identity.eagle),
                projected.prefill_tokens,
                projected.decode_blocks,
                held_blocks[rank],
            )
        )
    return terms


def choose(terms: list[Terms], settings: PolicySettings, rng: Random) -> Choice:
    """One of the candidates, by the policy `dynamo-1.0`; `terms` may not be empty."""
    costs = [dynamo_1_0(each, settings.prefill_load_scale) for each in terms]
    index = select(costs, terms, settings.router_temperature, rng)
    return Choice(index, terms, costs, "dynamo-1.0")
