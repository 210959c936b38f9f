"""From symptoms to what is likely wired wrongly, each with the numbers that speak for it."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from router.closed_loop.evidence import Evidence
from router.closed_loop.suspicion import Symptom
from router.closed_loop.tallies import Tally

CauseName: TypeAlias = Literal[
    "block_size",
    "salt",
    "hash_seed",
    "chat_template",
    "tokenizer",
    "offload",
    "events",
    "caching",
]

REMEDIES: Mapping[CauseName, str] = MappingProxyType(
    {
        "block_size": "register or announce the worker with its engine's block size",
        "salt": "send the router the cache_salt and lora_name that the engine gets, and no other",
        "hash_seed": "hash blocks as the router does (XXH3-64, seed 1337, chained), and give all "
        "engines that share blocks the same PYTHONHASHSEED",
        "chat_template": "render prompts as the engine does: its /tokenize, its chat template, its "
        "beginning-of-sequence token",
        "tokenizer": "tokenize with the tokenizer of the model that the engine serves",
        "offload": "report what the engine keeps in lower tiers (events of its offloading "
        "connector, or --tiers of the agent), and only what it really loads",
        "events": "have the engine publish its KV events, and the router or agent listen there",
        "caching": "switch the engine's prefix caching on, and its report of cached tokens",
    }
)


class Cause(Struct, frozen=True):
    """Something that may be wrong. `weight`: how much speaks for it, 0 to 1; causes of one finding
    are no alternatives that add up. `because`: the numbers; `remedy`: what to do.
    """

    name: CauseName
    weight: float
    because: str
    remedy: str


def likely_causes(evidence: Evidence) -> list[Cause]:
    """Of the symptoms that are raised, the likeliest first. Prompts that are counted otherwise
    explain whatever else is wrong with them.
    """
    found: dict[CauseName, Cause] = {}
    length = evidence.suspicions.get(Symptom.LENGTH)
    explains = length is not None and length.tally.requests >= 3
    for symptom, suspicion in evidence.suspicions.items():
        if not (suspicion.is_raised or (explains and symptom is Symptom.LENGTH)):
            continue
        share = 0.4 if explains and symptom is not Symptom.LENGTH else 1.0
        for cause in _CAUSES_OF[symptom](suspicion.tally):
            weighted = replace(cause, weight=round(cause.weight * share, 2))
            if cause.name not in found or found[cause.name].weight < weighted.weight:
                found[cause.name] = weighted
    return sorted(found.values(), key=lambda each: (-each.weight, each.name))


def _of_lengths(tally: Tally) -> Iterable[Cause]:
    told = tally.differences
    usual_tokens, times = told.usual
    mean_tokens = told.sum_tokens / tally.requests
    share = told.sum_tokens / max(told.sum_isl_tokens, 1)
    if times >= 0.9 * tally.requests:
        template, because = 0.9, f"engines count {usual_tokens:+d} tokens in {_of(times, tally)}"
    elif told.step_tokens >= 3 and 3 <= told.kinds <= 0.8 * tally.requests:
        template = 0.8
        because = f"what engines count otherwise is in steps of {told.step_tokens} tokens"
    else:
        template = 0.5 if times >= 0.5 * tally.requests else 0.2
        because = f"engines count {mean_tokens:+.1f} tokens ({share:+.1%}), and never the same"
    if tally.agreed_plain + tally.agreed_salted:
        template, because = 0.95, f"{because}; what was predicted is reused all the same"
    yield _cause("chat_template", template, because)
    yield _cause("tokenizer", 1 - template, because)


def _of_unshown(tally: Tally) -> Iterable[Cause]:
    if tally.fractions:
        because = f"in {_of(tally.fractions, tally)} what was cached is no whole number of blocks"
        yield _cause("block_size", 0.9, f"{because} of {tally.block_size} tokens")
    if tally.on_empty > tally.requests / 2:
        yield from _of_nothing_held(tally)
    else:
        yield from _of_other_names(tally)


def _of_nothing_held(tally: Tally) -> Iterable[Cause]:
    """No block of the rank is in the index."""
    because = f"the index showed no block of the worker in {_of(tally.on_empty, tally)}"
    yield _cause("events", 0.5, because)
    is_coarse = tally.cached_multiple % (2 * tally.block_size) == 0
    weight = (0.4 if is_coarse else 0.1) + (0.3 if tally.unreadable else 0.0)
    because += f", and all that was cached is in steps of {tally.cached_multiple} tokens"
    yield _cause("block_size", weight, because + "; events are unreadable" * bool(tally.unreadable))


def _of_other_names(tally: Tally) -> Iterable[Cause]:
    """Blocks are there, of prompts as long as ours, and are not found."""
    agreed = tally.agreed_plain + tally.agreed_salted
    named = tally.named_by_caller / tally.requests
    because = f"the worker holds blocks, and none are found of {_of(tally.requests, tally)}"
    salt, why_salt = _salt(tally)
    yield _cause("salt", salt * (0.5 if named > 0.5 else 1.0), why_salt)
    who = f"; {tally.named_by_caller} were hashed by their caller"
    seed = (0.8 if named > 0.5 else 0.4) * (0.3 if agreed else 1.0)
    yield _cause("hash_seed", seed, because + who)
    yield _cause("chat_template", 0.2, f"{because}; they are as long as ours")


def _salt(tally: Tally) -> tuple[float, str]:
    salted = f"{_of(tally.salted, tally)} came with a salt or LoRA"
    if tally.salted and not tally.agreed_salted and tally.agreed_plain:
        others = f"{tally.agreed_plain} without were predicted well"
        return 0.95, f"{salted}; {others}"
    if tally.salted == tally.requests:
        return 0.8, salted
    agreed = tally.agreed_plain + tally.agreed_salted
    return (0.6 if agreed else 0.5), f"{salted}; {agreed} others were predicted well"


def _of_more(tally: Tally) -> Iterable[Cause]:
    surplus_tokens = tally.cached_tokens - tally.predicted_tokens
    because = f"{_of(tally.requests, tally)} reused {surplus_tokens} tokens that no tier showed"
    yield _cause("offload", 0.9, because)


def _of_unused(tally: Tally) -> Iterable[Cause]:
    because = f"nothing was reused of {tally.predicted_tokens} tokens that the index showed"
    salted = tally.salted / tally.requests
    yield _cause("caching", 0.6, f"{because}, in {_of(tally.requests, tally)}")
    why = f"{because}; {_of(tally.salted, tally)} came with a salt or LoRA"
    yield _cause("salt", 0.7 if salted > 0.5 else 0.3, why)


def _of_tiers_unused(tally: Tally) -> Iterable[Cause]:
    lost_tokens = tally.predicted_tokens - tally.cached_tokens
    because = f"{lost_tokens} tokens in lower tiers were not loaded by {_of(tally.requests, tally)}"
    yield _cause("offload", 0.8, because)
    yield _cause("hash_seed", 0.3, because)


_CAUSES_OF = {
    Symptom.LENGTH: _of_lengths,
    Symptom.UNSHOWN: _of_unshown,
    Symptom.MORE: _of_more,
    Symptom.UNUSED: _of_unused,
    Symptom.TIERS_UNUSED: _of_tiers_unused,
}


def _cause(name: CauseName, weight: float, because: str) -> Cause:
    return Cause(name, weight, because, REMEDIES[name])


def _of(times: int, tally: Tally) -> str:
    return f"{times} of {tally.requests} requests"
