"""Events of real engines with hybrid models: each request before its events, compared with what the
engine found cached."""

import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from oracle.hybrid import cached_tokens
from router.protocol.hybrid import HybridSettings
from router.protocol.values import SCHEME, Identity
from router.sequence.hashing.block_hashes import sequence_hashes, token_array
from support.engines.engines import CLEARED, Edge, removed, stored

VECTORS = Path(__file__).parents[3] / "vectors"
CASES = {
    case["name"]: case
    for path in sorted(VECTORS.glob("hybrid_*.json"))
    for case in json.loads(path.read_text("utf-8"))["cases"]
}


def tokens_of(text):
    return [int(each, 36) for each in text]


def event_of(event):
    if event["type"] == "AllBlocksCleared":
        return CLEARED
    hashes = [int(each) for each in event["block_hashes"]]
    if event["type"] == "BlockRemoved":
        return removed(hashes, group=event["group_idx"])
    parent = event["parent_block_hash"]
    return stored(
        hashes,
        tokens_of(event["token_ids"]),
        None if parent is None else int(parent),
        block_size=event["block_size"],
        group=event["group_idx"],
        spec_kind=event["kv_cache_spec_kind"],
        sliding_window_tokens=event.get("kv_cache_spec_sliding_window"),
    )


def edge_of(case):
    """An edge as an engine like this one is registered: in units of its hashes."""
    groups, unit_tokens = case["groups"], case["hash_block_size"]
    hybrid = HybridSettings(
        next((g["attention_chunk_size"] for g in groups if "attention_chunk_size" in g), None),
        frozenset(g["group_idx"] for g in groups if g.get("use_eagle")),
    )
    return Edge(Identity(SCHEME, unit_tokens), hybrid=hybrid)


def predicted(edge, prompt):
    """The length and whether it is called exact."""
    unit_tokens, hybrid = edge.journal.identity.block_size, edge.journal.hybrid
    names = sequence_hashes(token_array(tokens_of(prompt)), unit_tokens).tolist()
    if hybrid is None:
        full = 0
        while full < len(names) and names[full] in edge.held():
            full += 1
        return min(full, (len(prompt) - 1) // unit_tokens) * unit_tokens, True
    held = edge.held()
    classes = [
        set(edge.journal.held_in_class(index).tolist())
        for index in range(len(hybrid.layout.classes))
    ]
    at = {end * unit_tokens: name for end, name in enumerate(names, 1)}
    length = cached_tokens(
        hybrid.layout,
        lambda end: at.get(end) in held,
        lambda index, end: at.get(end) in classes[index],
        len(prompt),
    )
    return length, not hybrid.layout.problem


@cache
def judged(name):
    """Count requests by what is said of them, as prompts arrive and events follow."""
    case = CASES[name]
    edge, counts, wrong = edge_of(case), Counter(), []
    for step in case["steps"]:
        for request in step.get("requests", ()):
            if request.get("together"):
                continue
            length, is_exact = predicted(edge, request["prompt"])
            is_right = length == request["cached_tokens"]
            counts.update(n=1, right=is_right, exact=is_exact)
            if is_exact and not is_right:
                wrong.append(request["name"])
        for batch in step["batches"]:
            edge.feed(*map(event_of, batch))
    return counts, wrong


BEFORE_ITS_EVENT = {"window_full_batches": ["prompt of 20 again"]}
"""The engine was reset, and says so with the events after the next request."""


@pytest.mark.parametrize("name", CASES)
def test_lengths_called_exact_are_what_the_engine_found(name):
    _, wrong = judged(name)
    assert wrong == BEFORE_ITS_EVENT.get(name, [])


@pytest.mark.parametrize(
    ("captured", "right", "exact", "requests"),
    [("model", 287, 255, 303), ("scheduler", 146, 113, 160)],
)
def test_most_requests_are_right_and_called_exact(captured, right, exact, requests):
    names = [name for name, case in CASES.items() if case["captured"] == captured]
    total = sum((judged(name)[0] for name in names), Counter())
    assert (total["n"], total["right"], total["exact"]) == (requests, right, exact)
