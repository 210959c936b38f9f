from io import BytesIO

import pytest

from router.core.commands import (
    Apply,
    ApplyLoad,
    Free,
    OutputBlock,
    PrefillComplete,
    Select,
    Submit,
    UpsertWorker,
)
from router.protocol.loads import LoadCounters
from router.protocol.requests import SelectRequest
from router.protocol.values import SCHEME, Identity, Rank
from router.publisher.journal.journal import EventJournal
from router.recording.format import Line, decode_header, decode_lines
from router.sequence.active.prompt import prepare
from router.simulator.calibration import CONSTANTS
from router.simulator.engine_model import llama_8b
from router.simulator.recorded import read_recording
from router.simulator.simulation import simulate
from router.simulator.summary import summarize
from router.simulator.traces import TraceError
from router.tools.recordings.cores import recorded_core
from support.fleets.recordings import Recorded, header
from support.fleets.simulator_worlds import make_core, scenario, small_trace
from support.values.builders import IDENTITY, announcement, report


def announced(recorded, worker_id, identity=IDENTITY, **fields):
    recorded.core.handle(
        UpsertWorker(announcement(worker_id, identity=identity, agent_is_engine=False, **fields)),
        0.0,
    )
    for message in EventJournal(Rank(worker_id, 0), 1, identity).take():
        recorded.core.handle(Apply(message), 0.0)


def asked(recorded, request_id, tokens, **fields):
    request = SelectRequest(token_ids=tokens, request_id=request_id, **fields)
    recorded.core.handle(Submit(request, prepare(request, ())), 1.0)


def traffic(recorded):
    file = BytesIO(recorded.recording)
    decode_header(file.readline())
    return read_recording("r", decode_lines(file))


def test_recorded_traffic_has_requests_and_fleet():
    """A line is 0.25 s after the one above."""
    recorded = Recorded()
    announced(recorded, 1)
    announced(recorded, 2)
    asked(recorded, "a", [1, 2, 3, 4, 5, 6], expected_output_tokens=9)
    asked(recorded, "b", list(range(1, 17)))
    for _ in range(3):
        recorded.core.handle(OutputBlock("b", None), 2.0)
    recorded.core.handle(Free("b"), 3.0)
    found = traffic(recorded)
    first, second = found.trace.requests
    assert (first.arrival_s, second.arrival_s) == (0, 0.25)
    assert (first.isl_tokens, first.osl_tokens, len(first.sequence_hashes)) == (6, 9, 1)
    assert (second.isl_tokens, second.osl_tokens, len(second.sequence_hashes)) == (16, 12, 4)
    assert second.sequence_hashes[0] == first.sequence_hashes[0]
    assert found.trace.block_size == 4
    assert [model.capacity_tokens for model in found.models] == [4000, 4000]


def test_unknown_sizes_are_taken_from_a_preset():
    recorded = Recorded()
    announced(recorded, 1, total_kv_blocks=0, max_num_batched_tokens=0)
    asked(recorded, "a", [1, 2, 3, 4])
    (model,) = traffic(recorded).models
    preset = llama_8b()
    assert (model.capacity_tokens, model.chunk_tokens) == (
        preset.capacity_tokens,
        preset.chunk_tokens,
    )


def test_an_answers_length_is_its_time_by_the_time_of_a_step():
    recorded = Recorded()
    announced(recorded, 1)
    asked(recorded, "a", [1, 2, 3, 4])
    recorded.core.handle(PrefillComplete("a"), 2.0)
    for steps, busy_s in ((0, 0.0), (100, 5.0)):
        counters = LoadCounters(steps=steps, busy_s=busy_s)
        recorded.core.handle(ApplyLoad(report(1, counters=counters)), 2.0)
    recorded.core.handle(Free("a"), 3.0)
    request = traffic(recorded).trace.requests[0]
    assert request.osl_tokens == 1 + round(0.75 / 0.05)


def test_constants_are_those_that_were_reported():
    recorded = Recorded()
    announced(recorded, 1)
    asked(recorded, "a", [1, 2, 3, 4])
    for i in range(30):
        prefill = sum((j * j) % 13 * 100 for j in range(i))
        counters = LoadCounters(steps=i, busy_s=0.01 * i + prefill * 1e-4, prefill_tokens=prefill)
        recorded.core.handle(ApplyLoad(report(1, counters=counters)), 2.0 + i)
    model = traffic(recorded).models[0]
    assert model.base_s == pytest.approx(0.01)
    assert model.prefill_token_s == pytest.approx(1e-4)
    assert model.chunk_tokens == 8192


def test_selections_count_where_nothing_is_booked():
    recorded = Recorded()
    announced(recorded, 1)
    request = SelectRequest(token_ids=[1, 2, 3, 4])
    recorded.core.handle(Select(request, prepare(request, ())), 1.0)
    found = traffic(recorded)
    assert len(found.trace.requests) == 1
    assert found.models[0].base_s == llama_8b().base_s
    asked(recorded, "a", [1, 2, 3, 4, 5])
    assert [r.isl_tokens for r in traffic(recorded).trace.requests] == [5]


def test_unsimulatable_recording_says_why():
    recorded = Recorded()
    with pytest.raises(TraceError, match="no request was placed"):
        traffic(recorded)
    announced(recorded, 1)
    announced(recorded, 2, Identity(SCHEME, 8))
    with pytest.raises(TraceError, match="one for all workers") as raised:
        traffic(recorded)
    assert raised.value.line == 4


def test_the_recording_of_a_simulated_router_is_the_trace_that_it_served():
    """And its engines' constants are those of their reports."""
    lines = []

    def make(rng):
        def take(entry):
            lines.append((len(lines) + 2, Line(getattr(entry, "now_s", 0.0), entry)))

        return recorded_core(header(policy="dynamo-1.0"), take)

    trace = small_trace(300)
    outcomes = simulate(trace, scenario(2, report_interval_s=0.1), make)
    found = read_recording("r", lines)
    first_s = trace.requests[0].arrival_s
    for was, is_ in zip(trace.requests, found.trace.requests, strict=True):
        assert is_.arrival_s == pytest.approx(was.arrival_s - first_s)
        assert (is_.isl_tokens, is_.sequence_hashes) == (was.isl_tokens, was.sequence_hashes)
    model = found.models[0]
    for name in CONSTANTS:
        assert getattr(model, name) == pytest.approx(getattr(llama_8b(), name), rel=1e-3)
    assert model.capacity_tokens == pytest.approx(llama_8b().capacity_tokens, abs=16)
    again = simulate(found.trace, scenario(2, model=model, report_interval_s=0.1), make_core())
    assert summarize(again).ttft_mean_s == pytest.approx(summarize(outcomes).ttft_mean_s, rel=0.15)
