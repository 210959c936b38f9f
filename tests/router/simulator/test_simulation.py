import numpy as np
import pytest
from msgspec.structs import replace

from router.core.commands import OutputBlock
from router.protocol.replies import TrustState
from router.protocol.values import Rank
from router.recording.recorded_core import RecordedCore
from router.sequence.rank_table import BASE_S, CONTEXT_S, RATE_ERROR
from router.simulator.engine_model import llama_8b, llama_70b
from router.simulator.scenario import Failure, LoadSources, SlowDown
from router.simulator.simulation import simulate
from router.simulator.summary import spread, summarize
from support.fleets.simulator_worlds import make_core, scenario, small_trace

POLLED = LoadSources(source="polled")


def columns(outcomes):
    return {name: getattr(outcomes, name) for name in outcomes.__struct_fields__}


def kept_cores(make):
    cores = []

    def make_and_keep(rng):
        cores.append(make(rng))
        return cores[-1]

    return cores, make_and_keep


def test_every_request_is_served_and_the_router_knows_it():
    cores, make = kept_cores(make_core())
    outcomes = simulate(small_trace(), scenario(), make)
    summary = summarize(outcomes)
    assert (summary.served, summary.unserved, summary.retried) == (120, 0, 0)
    assert np.all(outcomes.ttft_s > 0)
    assert np.all(outcomes.e2e_s >= outcomes.ttft_s)
    assert summary.hit_rate > 0.5
    assert len(cores[0].tracker) == 0
    cores[0].tracker.check_invariants()


def test_the_same_seed_gives_the_same_bits_and_another_other_ones():
    def run(seed):
        return columns(simulate(small_trace(), scenario(seed=seed), make_core(1.0, 0.5)))

    first, again, other = run(7), run(7), run(8)
    assert all(np.array_equal(first[name], again[name], equal_nan=True) for name in first)
    assert not np.array_equal(first["ttft_s"], other["ttft_s"])


def test_routers_index_is_what_engines_hold():
    """With 512 blocks each, engines evict all the time; the index follows, after the lag."""
    cores, make = kept_cores(make_core())
    small = replace(llama_8b(), capacity_tokens=8192)
    outcomes = simulate(small_trace(400), scenario(3, model=small), make)
    assert summarize(outcomes).unserved == 0
    for worker_id in range(3):
        trust = cores[0].trust(Rank(worker_id, 0), outcomes.sampled_s[-1])
        assert trust.state in (TrustState.EXACT, TrustState.LAGGING)
    assert cores[0].index.differences == 0
    assert 0 < cores[0].index.held_blocks(Rank(0, 0)) <= 512


def test_a_trace_twice_as_fast_waits_longer():
    slow = summarize(simulate(small_trace(), scenario(2), make_core()))
    fast = summarize(simulate(small_trace(), scenario(2, arrival_speed=8.0), make_core()))
    assert fast.ttft_mean_s > 1.2 * slow.ttft_mean_s


def test_late_events_lower_the_hit_rate():
    lags = {"event_lag_s": 1e6, "report_lag_s": 0.0}
    knowing = summarize(simulate(small_trace(), scenario(), make_core(8.0)))
    unknowing = summarize(simulate(small_trace(), scenario(**lags), make_core(8.0)))
    assert unknowing.hit_rate < knowing.hit_rate


def test_requests_of_a_dead_worker_begin_anew_elsewhere():
    cores, make = kept_cores(make_core())
    failure = Failure(at_s=2.0, worker=1, down_s=2.5)
    outcomes = simulate(small_trace(200), scenario(incidents=(failure,)), make)
    summary = summarize(outcomes)
    assert summary.unserved == 0
    assert summary.retried > 0
    finish_s = outcomes.arrivals_s + outcomes.e2e_s
    there = finish_s[outcomes.worker_ids == 1]
    assert not np.any((there > 2.0) & (there < 4.5))
    assert np.any(there > 4.5)
    assert len(cores[0].tracker) == 0


def test_without_workers_callers_give_up():
    dead = [Failure(0.0, worker, 1e9) for worker in range(2)]
    outcomes = simulate(small_trace(2), scenario(2, incidents=tuple(dead)), make_core())
    assert summarize(outcomes).unserved == 2


def test_request_that_fits_nowhere_is_not_served():
    tiny = replace(llama_8b(), capacity_tokens=16)
    outcomes = simulate(small_trace(1), scenario(1, model=tiny), make_core())
    assert summarize(outcomes).unserved == 1


def test_requests_take_longer_on_a_slow_worker():
    slow = SlowDown(at_s=0.0, worker=0, slowness=4.0)
    outcomes = simulate(small_trace(), scenario(incidents=(slow,)), make_core())
    on_slow = outcomes.worker_ids == 0
    assert np.nanmean(outcomes.tpot_s[on_slow]) > 2 * np.nanmean(outcomes.tpot_s[~on_slow])


def test_spread_is_the_coefficient_of_variation():
    assert spread(np.array([1.0, 3.0])) == 0.5
    assert spread(np.zeros(3)) == 0.0


def test_several_routers_share_work_and_bookings():
    cores, make = kept_cores(make_core())
    outcomes = simulate(small_trace(), scenario(routers=3), make)
    assert len(cores) == 3
    assert summarize(outcomes).unserved == 0
    for core in cores:
        assert len(core.tracker) == 0
        counts = core.foreign.replicas.counts
        assert counts.met == 2
        assert counts.frames.applied > 40
        assert (counts.frames.missing, counts.frames.differing, counts.gone) == (0, 0, 0)


def test_replica_sync_improves_balance():
    """Prompts share nothing here: only load decides."""
    trace = small_trace(300, gap_s=0.06, families=10_000)
    knowing = simulate(trace, scenario(routers=4, sync_lag_s=0.001), make_core())
    unknowing = simulate(trace, scenario(routers=4, sync_lag_s=1e6), make_core())
    assert summarize(knowing).ttft_mean_s < 0.8 * summarize(unknowing).ttft_mean_s


def test_gaps_are_counted_for_every_token_but_the_first():
    trace = small_trace()
    outcomes = simulate(trace, scenario(), make_core())
    assert outcomes.gap_counts.sum() == sum(each.osl_tokens - 1 for each in trace.requests)
    assert np.nanmax(outcomes.tpot_s) < 1.0


def test_busy_seconds_only_grow_and_never_faster_than_time():
    outcomes = simulate(small_trace(), scenario(), make_core())
    grown = np.diff(outcomes.busy_s, axis=0)
    assert grown.min() >= 0
    assert np.all(grown <= np.diff(outcomes.sampled_s)[:, None] + 1e-9)


def test_output_blocks_are_reported_where_callers_do():
    entries = []

    def run(**fields):
        make = make_core()
        recorded = lambda rng: RecordedCore(make(rng), entries.append).core  # noqa: E731
        simulate(small_trace(20), scenario(**fields), recorded)
        return sum(isinstance(each.command, OutputBlock) for each in entries)

    assert run() == 0
    assert run(tracks_output=True) > 10


def test_progress_rises_to_one():
    reported = []
    simulate(small_trace(), scenario(), make_core(), reported.append)
    assert reported == sorted(reported)
    assert reported[0] == 0
    assert reported[-1] == pytest.approx(1, abs=0.2)


def test_in_bursts_routers_that_take_turns_do_as_well_as_one():
    """Eight prompts at once every second, for eight ranks; late events help no router."""
    trace = small_trace(400, families=10_000)
    bursts = [replace(each, arrival_s=1.0 * (i // 8)) for i, each in enumerate(trace.requests)]

    def mean_ttft_s(routers, sync_lag_s):
        scene = scenario(8, routers=routers, sync_lag_s=sync_lag_s)
        make = make_core(default_policy="predictive")
        return summarize(simulate(replace(trace, requests=bursts), scene, make)).ttft_mean_s

    taking_turns = mean_ttft_s(4, 0.02)
    assert taking_turns < 1.05 * mean_ttft_s(1, 0.02)
    assert mean_ttft_s(4, 0.06) > 1.25 * taking_turns


def work_of(core, worker_id=0):
    """Seconds that a rank is expected to need for a prompt of 3,000 tokens."""
    base_s, token_s, context_s = core.ranks.row(Rank(worker_id, 0))[BASE_S : CONTEXT_S + 1]
    return base_s + 3_000 * token_s + 3_000**2 / 2 * context_s


@pytest.mark.parametrize("reports_late", [False, True])
def test_polled_engines_teach_their_rates(reports_late):
    """With late first tokens from the polls alone."""
    cores, make = kept_cores(make_core())
    fleet = scenario(2, model=llama_70b(), loads=POLLED, reports_late=reports_late)
    simulate(small_trace(500, gap_s=0.3, families=400), fleet, make)
    model = llama_70b()
    true_s = model.step_s([(3_000, 0)], 0, 0)
    assert work_of(cores[0]) == pytest.approx(true_s, rel=0.3)
    row = cores[0].ranks.row(Rank(0, 0))
    assert row[RATE_ERROR] < 0.5


def test_polled_fleet_gives_the_same_bits():
    def run():
        return columns(simulate(small_trace(), scenario(loads=POLLED), make_core()))

    first, again = run(), run()
    assert all(np.array_equal(first[name], again[name], equal_nan=True) for name in first)
