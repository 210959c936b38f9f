"""Registrations, complete or not, and the core they live in."""

import pytest

from router.core.commands import (
    ApplyPolled,
    Free,
    PrefillComplete,
    Reserve,
    SetCaution,
    SetConnected,
    SetProblem,
    Submit,
    Tick,
    UpsertWorker,
)
from router.core.errors import AnnouncedWorkerError, DoubledEndpointError, TooManyRegistrationsError
from router.core.registered_workers import complete_worker, missing
from router.core.registrations import Registrations
from router.errors import WorkerNotFoundError
from router.protocol.loads import LoadGauges, PolledLoad
from router.protocol.replicas import PromptUsage
from router.protocol.requests import ReserveRequest, SelectRequest
from router.protocol.workers import WorkerPatch, WorkerRegistration
from router.sequence.rank_table import BASE_S, CONTEXT_S, HELD_BLOCKS, USED_BLOCKS
from support.values.builders import World, announcement, rank


def registration(worker_id=1, port=1, **fields):
    defaults = {"endpoint": "http://w", "block_size": 4, "kv_events_endpoint": f"tcp://e:{port}"}
    return WorkerRegistration(worker_id=worker_id, **{**defaults, **fields})


def worker(worker_id=1, port=1, incarnation=1, **fields):
    made = complete_worker(registration(worker_id, port, **fields), incarnation)
    assert made is not None
    return made


@pytest.fixture
def world():
    return World()


@pytest.fixture
def registrations(world):
    return Registrations(world.core, max_ranks=4)


def test_complete_ones_are_in_the_core(registrations, world):
    registrations.put(worker(7), 0.0)
    assert registrations.get(7) == registration(7)
    assert [w.announcement.worker_id for w in world.core.fleet] == [7]
    assert world.core.fleet.get(7).announcement.source(rank(7)).events == "tcp://e:1"
    registrations.remove(7)
    assert not list(world.core.fleet)
    with pytest.raises(WorkerNotFoundError):
        registrations.get(7)


def test_estimated_blocks_are_held_up_to_the_capacity(registrations, world):
    registrations.put(worker(7, kv_events_endpoint=None, total_kv_blocks=5), 0.0)
    for number, held in enumerate((3, 5, 5)):
        tokens = list(range(100 * number, 100 * number + 12))
        prompt = SelectRequest(request_id=f"r{number}", token_ids=tokens, model_name="default")
        world.core.handle(Submit(prompt), 0.0)
        assert world.core.held_blocks(rank(7)) == held
    world.core.handle(Tick(), 1.0)
    assert world.core.ranks.row(rank(7))[HELD_BLOCKS] == 5


def test_becoming_incomplete_takes_a_worker_out_of_the_core(registrations, world):
    registrations.put(worker(7), 0.0)
    registrations.put_incomplete(registration(7, block_size=None))
    assert not list(world.core.fleet)
    assert registrations.get(7).block_size is None
    registrations.put(worker(7), 1.0)
    assert list(registrations) == [registration(7)]
    assert registrations.rank_count == 1


def test_a_refused_change_changes_nothing(registrations, world):
    registrations.put(worker(1, port=1), 0.0)
    registrations.put(worker(2, port=2), 0.0)
    with pytest.raises(DoubledEndpointError) as refused:
        registrations.put(worker(2, port=1), 1.0)
    assert refused.value.worker_id == 1
    five = {i: f"tcp://e:{10 + i}" for i in range(5)}
    with pytest.raises(TooManyRegistrationsError):
        registrations.put(worker(2, data_parallel_size=5, kv_events_endpoints=five), 1.0)
    assert {each.worker_id: each for each in registrations} == {
        1: registration(1, 1), 2: registration(2, 2),
    }  # fmt: skip


def test_announced_workers_are_not_registrations(registrations, world):
    world.core.handle(UpsertWorker(announcement(5)), 0.0)
    for change in (
        lambda: registrations.put(worker(5), 0.0),
        lambda: registrations.put_incomplete(registration(5)),
        lambda: registrations.remove(5),
        lambda: registrations.get(5),
    ):
        with pytest.raises(AnnouncedWorkerError):
            change()


def polled(worker_id, dp_rank=0, **fields):
    return ApplyPolled(
        PolledLoad(worker_id=worker_id, dp_rank=dp_rank, source_id=1, life_id=1, **fields)
    )


def test_polled_load_counts_for_registered_ranks_alone(registrations, world):
    registrations.put(worker(7), 0.0)
    world.worker(8)
    gauges = LoadGauges(running_requests=3, kv_used_blocks=50)
    for worker_id, dp_rank, is_known in ((7, 0, True), (7, 1, False), (8, 0, False), (9, 0, False)):
        assert world.core.handle(polled(worker_id, dp_rank, gauges=gauges), 1.0) == (is_known, [])
    row = world.core.ranks.row(rank(7))
    assert row[USED_BLOCKS] == 50
    assert world.core.fleet.gauges(rank(7), 2.0) == gauges
    assert world.core.fleet.gauges(rank(7), 10.0) is None  # not polled any more


def test_first_tokens_are_learned_at_ticks(registrations, world):
    registrations.put(worker(7), 0.0)
    world.core.handle(SetConnected(True), 0.0)
    for number in range(40):
        now_s = float(number)
        prompt = list(range(1000 * number, 1000 * number + 800))
        request = ReserveRequest(worker_id=7, request_id=str(number), token_ids=prompt)
        world.core.handle(Reserve(request), now_s)
        world.core.handle(PrefillComplete(str(number)), now_s + 0.4)
        usage = PromptUsage(len(prompt), 0)
        world.core.handle(Free(str(number), usage), now_s + 0.5)
        world.core.handle(Tick(), now_s + 0.5)
    row = world.core.ranks.row(rank(7))
    work = (1.0, 800.0, 800.0**2 / 2)
    rates = row[BASE_S : CONTEXT_S + 1]
    predicted_s = sum(done * rate for done, rate in zip(work, rates, strict=True))
    assert predicted_s == pytest.approx(0.4, rel=0.1)


def test_a_life_goes_on_while_registered(registrations):
    assert registrations.incarnation(7, fresh=9) == 9
    registrations.put(worker(7, incarnation=9), 0.0)
    assert registrations.incarnation(7, fresh=10) == 9
    registrations.remove(7)
    assert registrations.incarnation(7, fresh=10) == 10


def test_a_problem_keeps_a_worker_from_being_chosen(registrations, world):
    registrations.put(worker(7), 0.0)
    scope = registration(7).scope
    assert world.core.fleet.schedulable(scope)
    world.core.handle(SetProblem(7, "gone"), 0.0)
    assert not world.core.fleet.schedulable(scope)
    world.core.handle(SetProblem(7, None), 0.0)
    assert world.core.fleet.schedulable(scope)
    world.core.handle(SetProblem(8, "nobody"), 0.0)


def test_a_caution_is_a_reason_to_trust_less(world):
    world.worker(7)
    before = world.core.trust(rank(7), 0.5)
    assert before.state == "exact"
    world.core.handle(SetCaution(7, "vLLM 0.40 has not been tested"), 0.5)
    cautious = world.core.trust(rank(7), 0.5)
    assert (cautious.state, cautious.reason) == ("degraded", "vLLM 0.40 has not been tested")
    world.core.handle(SetCaution(7, None), 0.5)
    assert world.core.trust(rank(7), 0.5) == before
    world.core.handle(SetCaution(8, "of no worker"), 0.5)


def test_a_patch_changes_what_it_names():
    before = registration(7, topic="a", taints=["x"])
    assert before.patched(WorkerPatch(topic="b", taints=[])) == registration(
        7, topic="b", taints=[]
    )
    assert before.patched(WorkerPatch(lifecycle="draining")) == before


def test_missing_fields_are_named_in_the_recorded_words():
    assert missing(WorkerRegistration(worker_id=1)) == [
        "endpoint is required",
        "block_size must be greater than 0",
        "kv_events endpoint is required for dp_rank 0",
    ]
    assert missing(registration(data_parallel_size=2)) == [
        "kv_events endpoint is required for dp_rank 0",
        "kv_events endpoint is required for dp_rank 1",
    ]
    assert missing(registration()) == []
    assert missing(registration(kv_events_endpoint=None)) == []  # estimated from bookings
    assert missing(registration(kv_events_endpoint=None, kv_events_endpoints={})) == [
        "kv_events endpoint is required for dp_rank 0",
    ]
