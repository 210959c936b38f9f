import pytest

from router.core.commands import Free, OutputBlock, PrefillComplete
from router.dashboard.board.latency import (
    ENDED,
    MEMORY_S,
    OPEN,
    RECENT_S,
    WORKERS,
    Latencies,
    LatencyRow,
)
from router.protocol.replicas import PromptUsage
from support.values.builders import rank


def serve(latencies, request_id, begun_s, ttft_s, request_s, *, worker_id=1, tokens=None):
    """A request from its placement to its end; `ttft_s` None: without a first token."""
    timed = latencies.begin(request_id, "m", rank(worker_id), begun_s)
    if ttft_s is not None:
        latencies.report(PrefillComplete(request_id), begun_s + ttft_s)
    latencies.report(OutputBlock(request_id, None), begun_s + request_s)
    usage = None if tokens is None else PromptUsage(8, 0, output_tokens=tokens)
    latencies.report(Free(request_id, usage), begun_s + request_s)
    return timed


def test_measured_times_are_beside_the_predictions_of_the_same_requests():
    latencies = Latencies()
    first = serve(latencies, "a", 0.0, 0.5, 2.5, tokens=11)
    second = serve(latencies, "b", 10.0, 1.5, 2.5)
    failed = serve(latencies, "c", 20.0, None, 0.5)
    first.predicted_ttft_s, first.predicted_tpot_s = 0.4, 0.1  # explained after its end
    second.predicted_ttft_s, failed.predicted_ttft_s = 1.0, 9.0
    row = LatencyRow("m", None, 3, 1, 1.0, 0.7, 0.2, 0.1, pytest.approx(5.5 / 3, abs=1e-6))
    model, worker = latencies.rows(30.0)
    assert model == row
    assert (worker.worker_id, worker.requests, worker.ttft_s) == ("1", 3, 1.0)
    assert latencies.recent(30.0) == (1.0, 0.7)
    assert latencies.recent(11.0 + RECENT_S) == (1.5, 1.0)
    assert latencies.recent(12.0 + RECENT_S) == (None, None)


def test_the_slowest_workers_have_rows():
    latencies = Latencies()
    for worker_id in range(1, 41):
        serve(latencies, f"r{worker_id}", 0.0, worker_id / 10, 9.0, worker_id=worker_id)
    model, *workers = latencies.rows(9.0)
    assert (model.worker_id, model.requests) == (None, 40)
    assert len(workers) == WORKERS
    assert [row.worker_id for row in workers[:3]] == ["40", "39", "38"]


def test_unknown_requests_and_repeated_reports_change_nothing():
    latencies = Latencies()
    latencies.report(PrefillComplete("x"), 1.0)
    latencies.report(Free("x"), 1.0)
    latencies.begin("a", "m", rank(1), 0.0)
    for at_s in (1.0, 2.0):
        latencies.report(PrefillComplete("a"), at_s)
    for at_s in (3.0, 4.0):
        latencies.report(Free("a"), at_s)
    (row, _) = latencies.rows(5.0)
    assert (row.requests, row.ttft_s, row.request_s) == (1, 1.0, 3.0)


def test_memory_is_bounded():
    latencies = Latencies()
    for number in range(2 * OPEN):
        latencies.begin(f"open{number}", "m", rank(1), 0.0)
    latencies.report(Free("open0"), 1.0)
    assert latencies.rows(1.0) == []
    for number in range(2 * ENDED):
        serve(latencies, f"r{number}", 1.0, 0.1, 1.0)
    assert latencies.rows(2.0)[0].requests == ENDED
    assert latencies.rows(3.0 + MEMORY_S) == []
