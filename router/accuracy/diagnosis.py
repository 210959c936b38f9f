"""The diagnosis of symptoms: likely misconfigurations, each with the numbers that support it."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from router.accuracy.differences import DifferenceTotals
from router.accuracy.sequential_test import GroupEvidence, Symptom

CauseName: TypeAlias = Literal[
    "block_size",
    "salt",
    "hash_seed",
    "chat_template",
    "tokenizer",
    "offload",
    "events",
    "caching",
    "layout",
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
        "layout": "register what no event says of the model's layers: eagle_groups, if its engine "
        "drafts tokens (EAGLE, MTP); chunk_tokens and silent_block_sizes of hybrid models",
    }
)


class Diagnosis(Struct, frozen=True):
    """A likely misconfiguration.

    `weight`: the support for it, 0 to 1; the weights of one finding's causes need not add up to 1.
    `because`: the numbers that support it. `remedy`: the recommended action.
    """

    name: CauseName
    weight: float
    because: str
    remedy: str


def likely_diagnoses(evidence: GroupEvidence) -> list[Diagnosis]:
    """Return the causes of the raised symptoms, the likeliest first.

    Differing prompt lengths explain the other symptoms too, so they lower the weight of other
    causes.
    """
    found: dict[CauseName, Diagnosis] = {}
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


def _of_lengths(tally: DifferenceTotals) -> Iterable[Diagnosis]:
    totals = tally.differences
    usual_tokens, times = totals.usual
    mean_tokens = totals.sum_tokens / tally.requests
    share = totals.sum_tokens / max(totals.sum_isl_tokens, 1)
    if times >= 0.9 * tally.requests:
        template, because = 0.9, f"engines count {usual_tokens:+d} tokens in {_of(times, tally)}"
    elif totals.step_tokens >= 3 and 3 <= totals.kinds <= 0.8 * tally.requests:
        template = 0.8
        because = f"prompt lengths differ in steps of {totals.step_tokens} tokens"
    else:
        template = 0.5 if times >= 0.5 * tally.requests else 0.2
        because = f"engines count {mean_tokens:+.1f} tokens ({share:+.1%}), varying by request"
    if tally.agreed_plain + tally.agreed_salted:
        template, because = 0.95, f"{because}; the predicted prefix is reused nevertheless"
    yield _cause("chat_template", template, because)
    yield _cause("tokenizer", 1 - template, because)


def _of_unshown(tally: DifferenceTotals) -> Iterable[Diagnosis]:
    if tally.fractions:
        because = f"in {_of(tally.fractions, tally)} the cached part is no whole number of blocks"
        yield _cause("block_size", 0.9, f"{because} of {tally.block_size} tokens")
    if tally.held_in_full > tally.requests / 2:
        because = "full attention holds what was reused, but no place to resume was predicted"
        yield _cause("layout", 0.9, f"{because} in {_of(tally.held_in_full, tally)}")
    elif tally.on_empty > tally.requests / 2:
        yield from _of_nothing_held(tally)
    else:
        yield from _of_other_names(tally)


def _of_nothing_held(tally: DifferenceTotals) -> Iterable[Diagnosis]:
    """Yield the causes if the index has no block of the rank."""
    because = f"the index showed no block of the worker in {_of(tally.on_empty, tally)}"
    yield _cause("events", 0.5, because)
    is_coarse = tally.cached_multiple % (2 * tally.block_size) == 0
    weight = (0.4 if is_coarse else 0.1) + (0.3 if tally.unreadable else 0.0)
    because += f", and all cached parts are in steps of {tally.cached_multiple} tokens"
    yield _cause("block_size", weight, because + "; events are unreadable" * bool(tally.unreadable))


def _of_other_names(tally: DifferenceTotals) -> Iterable[Diagnosis]:
    """Yield the causes if the rank's blocks are in the index, but do not match the prompts."""
    agreed = tally.agreed_plain + tally.agreed_salted
    named = tally.named_by_caller / tally.requests
    because = f"the index has blocks of the worker, but none match in {_of(tally.requests, tally)}"
    salt, why_salt = _salt(tally)
    yield _cause("salt", salt * (0.5 if named > 0.5 else 1.0), why_salt)
    who = f"; {tally.named_by_caller} were hashed by their caller"
    seed = (0.8 if named > 0.5 else 0.4) * (0.3 if agreed else 1.0)
    yield _cause("hash_seed", seed, because + who)
    yield _cause("chat_template", 0.2, f"{because}; prompt lengths are equal")


def _salt(tally: DifferenceTotals) -> tuple[float, str]:
    salted = f"{_of(tally.salted, tally)} came with a salt or LoRA"
    if tally.salted and not tally.agreed_salted and tally.agreed_plain:
        others = f"{tally.agreed_plain} without were predicted well"
        return 0.95, f"{salted}; {others}"
    if tally.salted == tally.requests:
        return 0.8, salted
    agreed = tally.agreed_plain + tally.agreed_salted
    return (0.6 if agreed else 0.5), f"{salted}; {agreed} others were predicted well"


def _of_more(tally: DifferenceTotals) -> Iterable[Diagnosis]:
    surplus_tokens = tally.cached_tokens - tally.predicted_tokens
    because = f"{_of(tally.requests, tally)} reused {surplus_tokens} tokens that no tier contained"
    yield _cause("offload", 0.9, because)


def _of_unused(tally: DifferenceTotals) -> Iterable[Diagnosis]:
    because = f"nothing was reused of {tally.predicted_tokens} tokens that the index contained"
    salted = tally.salted / tally.requests
    yield _cause("caching", 0.6, f"{because}, in {_of(tally.requests, tally)}")
    why = f"{because}; {_of(tally.salted, tally)} came with a salt or LoRA"
    yield _cause("salt", 0.7 if salted > 0.5 else 0.3, why)
    if tally.hybrid > tally.requests / 2:
        agreed = tally.agreed_plain + tally.agreed_salted
        yield _cause("layout", 0.8 if agreed else 0.5, f"{because}, on a hybrid model")


def _of_earlier(tally: DifferenceTotals) -> Iterable[Diagnosis]:
    usual_tokens, times = tally.shortfalls.usual
    because = f"{_of(times, tally)} were resumed {usual_tokens} tokens earlier than predicted"
    yield _cause("layout", 0.9, because)


def _of_tiers_unused(tally: DifferenceTotals) -> Iterable[Diagnosis]:
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
    Symptom.EARLIER: _of_earlier,
}


def _cause(name: CauseName, weight: float, because: str) -> Diagnosis:
    return Diagnosis(name, weight, because, REMEDIES[name])


def _of(times: int, tally: DifferenceTotals) -> str:
    return f"{times} of {tally.requests} requests"
