"""What is wrong with a worker, from its sockets and its server alone."""

import pytest

from router.core.registered_workers import complete_worker
from router.discovery.engine_servers import NOT_ASKED, ServedModels, ServerState, is_server
from router.discovery.worker_verdicts import GONE_S, LOST_REQUESTS, SILENT_S, verdict
from router.ingest.direct_rank import RankSockets
from router.protocol.workers import WorkerRegistration
from support.values.builders import rank

ENDPOINT = "http://w:8000"
WORKER = complete_worker(
    WorkerRegistration(worker_id=1, model_name="m", endpoint=ENDPOINT, block_size=4), 1
)
ANSWERS = NOT_ASKED.after(ServedModels(names=frozenset({"m"}), owner="vllm"))
FAILS = NOT_ASKED.after(ServedModels("refused"))
DEAD = RankSockets("tcp://w:1", was_reached=False, absent_s=SILENT_S, problem="nothing listens")
NEW = RankSockets("tcp://w:1", was_reached=False, absent_s=0.0, problem=None)
LIVE = RankSockets("tcp://w:1", was_reached=True, absent_s=0.0, problem=None)
GONE = RankSockets("tcp://w:1", was_reached=True, absent_s=GONE_S, problem="lost")


def judged(*sockets, server=NOT_ASKED):
    return verdict(WORKER, {rank(1, i): each for i, each in enumerate(sockets)}, server)


def lost(requests):
    state = ANSWERS
    for _ in range(requests):
        state = state.after(ServedModels("refused"))
    return state


@pytest.mark.parametrize(
    ("sockets", "server", "problem", "is_unreachable"),
    [
        ((), None, None, False),
        ((), NOT_ASKED, None, False),
        ((), ANSWERS, None, False),
        ((), FAILS, f"unreachable: {ENDPOINT} never answered: refused", True),
        ((), lost(LOST_REQUESTS - 1), None, False),
        ((), lost(LOST_REQUESTS), f"{ENDPOINT} does not answer any more: refused", False),
        ((NEW,), FAILS, None, False),
        ((DEAD,), NOT_ASKED, None, False),
        ((DEAD,), ANSWERS, None, False),
        (
            (DEAD,),
            FAILS,
            f"unreachable: neither {ENDPOINT} nor its event sockets ever answered",
            True,
        ),
        (
            (DEAD, DEAD),
            None,
            "unreachable: neither an HTTP server, which it does not name, nor its event sockets "
            "ever answered",
            True,
        ),
        ((DEAD, LIVE), FAILS, None, False),
        ((GONE, LIVE), FAILS, None, False),
        ((GONE, DEAD), ANSWERS, None, False),
        ((GONE, GONE), ANSWERS, f"its engines could not be reached for {GONE_S:g} s", False),
        ((LIVE,), FAILS, None, False),
    ],
)
def test_worker_that_answers_nowhere_is_not_chosen(sockets, server, problem, is_unreachable):
    found = judged(*sockets, server=server)
    assert (found.problem, found.is_unreachable) == (problem, is_unreachable)


def test_dead_socket_of_a_live_engine_is_estimated():
    for found in (judged(DEAD, server=ANSWERS), judged(DEAD, LIVE, server=FAILS)):
        fault = found.faults[rank(1, 0)]
        assert fault.effect == "estimate"
        assert fault.text == "nothing listens (cached blocks are estimated from bookings)"
        assert rank(1, 1) not in found.faults


def test_dead_socket_of_an_unreachable_worker_is_explained_alone():
    assert judged(DEAD, server=FAILS).faults[rank(1, 0)].effect == "explain"


def test_messages_of_another_rank_degrade_and_other_problems_explain():
    other = RankSockets("tcp://w:1", True, 0.0, "batches of rank 1", is_of_another=True)
    refused = RankSockets("tcp://w:1", True, 0.0, "blocks of 4 tokens")
    assert judged(other, server=ANSWERS).faults[rank(1)].effect == "degrade"
    assert judged(refused, server=ANSWERS).faults[rank(1)].effect == "explain"


def test_other_model_is_refused_by_vllm_and_degrades_elsewhere():
    names, sentence = frozenset({"x", "y"}), "wrong model: its server serves 'x', 'y'"
    vllm = judged(LIVE, server=NOT_ASKED.after(ServedModels(names=names, owner="vllm")))
    assert vllm.problem.startswith(sentence)
    sglang = judged(LIVE, server=NOT_ASKED.after(ServedModels(names=names, owner="sglang")))
    assert sglang.problem is None
    fault = sglang.faults[rank(1)]
    assert (fault.effect, fault.text.startswith(sentence)) == ("degrade", True)


def test_model_that_is_not_named_or_not_listed_is_not_judged():
    unnamed = complete_worker(WorkerRegistration(worker_id=1, endpoint="x", block_size=4), 1)
    server = NOT_ASKED.after(ServedModels(names=frozenset({"x"}), owner="vllm"))
    assert verdict(unnamed, {}, server).problem is None
    assert judged(LIVE, server=NOT_ASKED.after(ServedModels())).problem is None


def test_one_response_ends_a_row_of_failures():
    assert lost(5).after(ServedModels()) == ServerState(has_answered=True)


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [("http://a", True), ("https://a:1", True), ("tcp://a:1", False), ("a:8000", False),
     ("http://", False), ("http://[a", False), ("", False)],
)  # fmt: skip
def test_http_servers_are_told_from_other_endpoints(endpoint, expected):
    assert is_server(endpoint) is expected
