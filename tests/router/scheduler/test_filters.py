"""Eligible ranks of a request: what every filter removes, and what it keeps."""

from math import exp, tanh

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.catalogue import WorkerLabels
from router.protocol.requests import RankTarget, RoutingConstraints, SelectRequest
from router.scheduler.filters import (
    NO_CONSTRAINTS,
    Pool,
    Removed,
    bits_of,
    demands_something,
    eligible,
    mask_of,
    merged,
    transfer_constraints,
)
from support.values.builders import announcement, rank


def pool(*labels):
    """Workers 1, 2, … of two ranks each."""
    workers = [
        announcement(i, data_parallel_size=2, labels=WorkerLabels(**each))
        for i, each in enumerate(labels, start=1)
    ]
    pairs = [(each, worker) for worker in workers for each in worker.ranks]
    return Pool([each for each, _ in pairs], [worker for _, worker in pairs])


def ask(candidates, *, hard=True, busy=(), **fields):
    request = SelectRequest(**fields)
    over = bits_of(np.array([str(each) in busy for each in candidates.ranks], bool))
    constraints = request.routing_constraints or NO_CONSTRAINTS
    return eligible(candidates, request, constraints, is_hard=hard, busy=over)


def left(candidates, **fields):
    return [str(each) for each in candidates.named(ask(candidates, **fields).kept)]


THREE = pool({}, {}, {})
ALL = ["1.0", "1.1", "2.0", "2.1", "3.0", "3.1"]


def test_a_request_without_demands_needs_no_filter():
    assert not demands_something(SelectRequest(token_ids=[1], session_id="s"))
    assert left(THREE) == ALL


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"allowed_worker_ids": [3, 1, 99]}, ["1.0", "1.1", "3.0", "3.1"]),
        ({"allowed_worker_ids": []}, []),
        ({"excluded_worker_ids": [3, 1, 99]}, ["2.0", "2.1"]),
        ({"excluded_worker_ids": []}, ALL),
        ({"excluded_worker_ids": [1], "allowed_worker_ids": [1, 2]}, ["2.0", "2.1"]),
        ({"pinned_worker": RankTarget(2, 1)}, ["2.1"]),
        ({"pinned_worker": RankTarget(2)}, ["2.0", "2.1"]),
        ({"pinned_worker": RankTarget(2, 9)}, []),
        ({"pinned_worker": RankTarget(99)}, []),
        ({"allowed_worker_ids": [1], "pinned_worker": RankTarget(2)}, []),
    ],
)
def test_named_workers_and_ranks_are_kept(fields, expected):
    assert demands_something(SelectRequest(**fields))
    assert left(THREE, **fields) == expected


def test_role_serves_its_phase_and_prefill_workers_no_other():
    roles = ("prefill", "decode", "aggregated")
    workers = [announcement(i, role=role) for i, role in enumerate(roles, start=1)]
    candidates = Pool([rank(i) for i in (1, 2, 3)], workers)
    assert left(candidates) == ["2.0", "3.0"]
    assert left(candidates, phase="decode") == ["2.0", "3.0"]
    assert left(candidates, phase="aggregated") == ["2.0", "3.0"]
    assert left(candidates, phase="prefill") == ["1.0"]
    found = ask(candidates, phase="prefill")
    assert candidates.removed(found) == (Removed("role", (rank(2), rank(3))),)
    assert left(THREE, phase="prefill") == []
    assert left(THREE, phase="aggregated") == ALL


def test_every_required_taint_is_required():
    tainted = pool({"taints": ["gpu=h100", "spot"]}, {"taints": ["gpu=h100"]}, {})
    required = RoutingConstraints(required_taints=["gpu=h100"])
    assert left(tainted, routing_constraints=required) == ALL[:4]
    both = RoutingConstraints(required_taints=["spot", "gpu=h100"])
    assert left(tainted, routing_constraints=both) == ALL[:2]
    assert left(tainted, routing_constraints=RoutingConstraints()) == ALL


def test_a_place_is_a_taint():
    places = pool({"topology_domains": {"zone": "a", "rack": "7"}}, {"topology_domains": {}}, {})
    zone = RoutingConstraints(required_taints=["dynamo.topology/zone=a", "dynamo.topology/rack=7"])
    assert left(places, routing_constraints=zone) == ALL[:2]
    assert left(places, routing_constraints=RoutingConstraints(["dynamo.topology/zone=b"])) == []


def test_adapters_go_where_they_can_be_served():
    adapters = pool({"lora_names": ["sql"]}, {"lora_names": []}, {})
    assert left(adapters, lora_name="sql") == ["1.0", "1.1", "3.0", "3.1"]
    assert left(adapters, lora_name="poetry") == ["3.0", "3.1"]
    assert left(adapters) == ALL


def test_each_filter_names_the_ranks_it_removed():
    candidates = pool({"taints": ["a"]}, {"taints": ["a"], "lora_names": []}, {})
    found = ask(
        candidates,
        allowed_worker_ids=[1, 2],
        routing_constraints=RoutingConstraints(["a"]),
        lora_name="sql",
        busy=("1.0", "1.1", "2.0"),
    )
    assert not found.kept
    assert candidates.removed(found) == (
        Removed("allowed_worker_ids", (rank(3), rank(3, 1))),
        Removed("lora_name", (rank(2), rank(2, 1))),
        Removed("busy", (rank(1), rank(1, 1))),
    )
    assert found.last_filter == "busy"
    assert ask(candidates).last_filter is None


# ── Sessions ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("hard", [True, False])
def test_a_bound_session_goes_to_its_rank(hard):
    assert left(THREE, hard=hard, affinity_target=RankTarget(2, 1)) == ["2.1"]
    assert left(THREE, hard=hard, affinity_target=RankTarget(2)) == ["2.0", "2.1"]


@pytest.mark.parametrize("hard", [True, False])
def test_affinity_to_a_missing_rank_is_ignored(hard):
    assert left(THREE, hard=hard, affinity_target=RankTarget(9, 0)) == ALL


def test_a_hard_binding_waits_for_its_rank_and_a_soft_one_gives_way():
    bound = {"affinity_target": RankTarget(2, 1), "busy": ("2.1", "3.0")}
    assert left(THREE, hard=True, **bound) == []
    assert ask(THREE, hard=True, **bound).last_filter == "busy"
    assert left(THREE, hard=False, **bound) == ["1.0", "1.1", "2.0", "3.1"]
    elsewhere = {"affinity_target": RankTarget(2, 1), "allowed_worker_ids": [1]}
    assert left(THREE, hard=True, **elsewhere) == []
    assert ask(THREE, hard=True, **elsewhere).last_filter == "session_affinity"
    assert left(THREE, hard=False, **elsewhere) == ["1.0", "1.1"]


# ── Preferences ──────────────────────────────────────────────────────────────────────────────────


def test_preferred_taints_bend_costs_between_1_over_e_and_e():
    tainted = pool({"taints": ["a", "b"]}, {"taints": ["a"]}, {})
    factors = tainted.factors({"a": 0.5, "b": -2.0, "c": 9.0})
    expected = [exp(-tanh(-1.5)), exp(-tanh(0.5)), 1.0]
    assert factors.tolist() == pytest.approx([each for each in expected for _ in range(2)])
    assert tainted.factors({"a": 1e9})[0] == pytest.approx(1 / exp(1))
    assert tainted.factors({"a": 0.5, "b": -0.5})[0] == 1.0


def test_prefill_worker_restricts_the_decode_worker():
    zoned = {"topology_domains": {"zone": "a"}, "kv_transfer_domain": "zone"}
    taint = "dynamo.topology/zone=a"
    assert transfer_constraints(WorkerLabels(**zoned)) == RoutingConstraints([taint])
    preferred = WorkerLabels(**zoned, kv_transfer_enforcement="preferred")
    assert transfer_constraints(preferred) == RoutingConstraints(preferred_taints={taint: 1.0})
    weighed = WorkerLabels(
        **zoned, kv_transfer_enforcement="preferred", kv_transfer_preferred_weight=0.85
    )
    assert transfer_constraints(weighed).preferred_taints == {taint: 0.85}
    assert transfer_constraints(WorkerLabels(kv_transfer_domain="zone")) == NO_CONSTRAINTS
    assert transfer_constraints(WorkerLabels()) == NO_CONSTRAINTS


def test_constraints_add_up():
    one = RoutingConstraints(["x"], {"a": 1.0, "b": 2.0})
    assert merged(one, RoutingConstraints(["y"], {"b": -0.5})) == RoutingConstraints(
        ["x", "y"], {"a": 1.0, "b": 1.5}
    )


# ── Whatever is asked ────────────────────────────────────────────────────────────────────────────

TAINTS = st.lists(st.sampled_from("abc"), max_size=3)
IDS = st.none() | st.lists(st.integers(1, 6), max_size=4)
TARGETS = st.none() | st.builds(RankTarget, st.integers(1, 6), st.none() | st.integers(0, 2))
LABELS = st.fixed_dictionaries(
    {"taints": TAINTS, "lora_names": st.none() | st.lists(st.sampled_from("ab"), max_size=2)}
)
REQUESTS = st.builds(
    SelectRequest,
    allowed_worker_ids=IDS,
    excluded_worker_ids=IDS,
    phase=st.none() | st.sampled_from(["prefill", "decode", "aggregated"]),
    pinned_worker=TARGETS,
    affinity_target=TARGETS,
    routing_constraints=st.none() | st.builds(RoutingConstraints, TAINTS),
    lora_name=st.none() | st.sampled_from("abc"),
)


def is_target(target, each):
    return target.worker_id == each.worker_id and target.dp_rank in (None, each.dp_rank)


def predicates(request, workers):
    """The filters before the session's, in order: a name and a question about a rank."""
    phase, allowed, excluded = (
        request.phase,
        request.allowed_worker_ids,
        request.excluded_worker_ids,
    )
    required = set((request.routing_constraints or NO_CONSTRAINTS).required_taints)
    pinned, name = request.pinned_worker, request.lora_name

    def labels(each):
        return workers[each.worker_id].labels

    def serves(each):
        served = labels(each).lora_names
        return name is None or served is None or name in served

    return [
        ("role", lambda e: (workers[e.worker_id].role == "prefill") == (phase == "prefill")),
        ("allowed_worker_ids", lambda e: allowed is None or e.worker_id in allowed),
        ("excluded_worker_ids", lambda e: not excluded or e.worker_id not in excluded),
        ("pinned_worker", lambda e: pinned is None or is_target(pinned, e)),
        ("required_taints", lambda e: required <= set(labels(e).taints)),
        ("lora_name", serves),
    ]


def slowly(ranks, workers, request, busy, is_hard):
    """The ranks that are left, and those that each filter removes: a reference, rank by rank."""
    target, struck = request.affinity_target, []
    bound = [each for each in ranks if target is not None and is_target(target, each)]
    steps = predicates(request, workers)
    if bound and is_hard:
        steps.append(("session_affinity", lambda each: each in bound))
    steps.append(("busy", lambda each: each not in busy))
    for name, keeps in steps:
        out = tuple(each for each in ranks if not keeps(each))
        ranks = [each for each in ranks if keeps(each)]
        struck += [Removed(name, out)] if out else []
    if not is_hard and (kept := [each for each in ranks if each in bound]):
        struck.append(Removed("session_affinity", tuple(e for e in ranks if e not in bound)))
        ranks = kept
    return ranks, struck


@given(
    labels=st.lists(st.tuples(LABELS, st.sampled_from(["aggregated", "decode", "prefill"]))),
    request=REQUESTS,
    busy=st.sets(st.builds(rank, st.integers(1, 6), st.integers(0, 1)), max_size=4),
    is_hard=st.booleans(),
)
def test_any_request_leaves_what_a_reference_leaves_rank_by_rank(labels, request, busy, is_hard):
    workers = {
        i: announcement(i, data_parallel_size=2, role=role, labels=WorkerLabels(**each))
        for i, (each, role) in enumerate(labels, start=1)
    }
    ranks = [each for worker in workers.values() for each in worker.ranks]
    candidates = Pool(ranks, [workers[each.worker_id] for each in ranks])
    constraints = request.routing_constraints or NO_CONSTRAINTS
    over = bits_of(np.array([each in busy for each in ranks], bool))
    found = eligible(candidates, request, constraints, is_hard=is_hard, busy=over)
    kept, struck = slowly(ranks, workers, request, busy, is_hard)
    assert candidates.named(found.kept) == kept
    assert list(candidates.removed(found)) == struck
    mask = mask_of(found.kept, len(ranks))
    assert mask.tolist() == [each in kept for each in ranks]
    assert bits_of(mask) == found.kept
