"""What ranks take how long for: from reports to columns."""

from random import Random

import numpy as np
import pytest
from msgspec.structs import astuple, replace

from router.protocol.loads import (
    LoadConstants,
    LoadCounters,
    LoadGauges,
    PolledLoad,
    TimedWork,
)
from router.protocol.values import Rank
from router.scheduler.policy.predictive import Predictive
from router.scheduler.predictor.predictor import MOST_MODELS, Predictor
from router.scheduler.predictor.rates import NOMINAL_S
from router.scheduler.predictor.shared_model import LEAST_SPREAD
from router.scheduler.settings import PolicySettings
from router.sequence.active.tracker import FirstToken
from router.sequence.rank_table import (
    BASE_S,
    CHUNK_TOKENS,
    COMPLETED_CONTEXTS,
    COMPLETED_TOKENS,
    CONTEXT_S,
    DECODE_S,
    FOREIGN_REQUESTS,
    FOREIGN_TOKENS,
    KV_S,
    MAX_BATCHED_TOKENS,
    OUTPUT_TOKENS,
    PREFILL_S,
    PREFILL_SHARE,
    PREFILL_TOKENS,
    QUEUED_TOKENS,
    RANK_COLUMNS,
    RATE_ERROR,
    RELATIVE_ERROR,
    REQUESTS,
    REQUESTS_PER_S,
    REUSE,
    SLOW_UNTIL_S,
    RankTable,
)
from support.engines.engine_work import LARGE_S, CountingEngine, mixed_second
from support.values.terms import candidate, table

RATES = slice(BASE_S, KV_S + 1)
BUSY = LoadGauges(running_requests=4)
NEW_WORKER = 100_000


class Fleet:
    """Engines of one model that report each second, and a predictor that listens."""

    def __init__(self, *worker_ids, seed=1):
        self.random = Random(seed)
        self.now_s = 1_000.0
        self.table = RankTable()
        self.predictor = Predictor(self.table)
        self.engines = {}
        for worker_id in worker_ids:
            self.join(worker_id)

    def join(self, worker_id, model="m"):
        self.engines[worker_id] = CountingEngine(worker_id)
        self.table.add(Rank(worker_id, 0))
        self.predictor.add(Rank(worker_id, 0), model, self.now_s)

    def row(self, worker_id):
        return self.table.values[self.table.slot(Rank(worker_id, 0))]

    def rates(self, worker_id):
        return self.row(worker_id)[RATES].copy()

    def usual_rates(self):
        """The rates of the model `m`, which a rank that joins has."""
        self.join(NEW_WORKER)
        rates = self.rates(NEW_WORKER)
        self.predictor.drop(Rank(NEW_WORKER, 0))
        del self.engines[NEW_WORKER]
        return rates

    def pass_seconds(self, seconds, *, working, **hidden):
        """Each engine in `working` has something to do in each second; all of them report."""
        for _ in range(seconds):
            self.now_s += 1
            for worker_id in working:
                self.engines[worker_id].work(mixed_second(self.random))
            for engine in self.engines.values():
                self.predictor.observe(engine.report(**hidden), self.now_s)
        self.predictor.check_invariants()


def assert_predicts(seconds, true_s, rel=0.05):
    random = Random(8)
    for _ in range(20):
        done = mixed_second(random)
        assert done @ seconds == pytest.approx(done @ true_s, rel=rel)


def test_the_first_rank_of_a_model_takes_what_is_usual():
    fleet = Fleet(1)
    assert fleet.rates(1) == pytest.approx(NOMINAL_S)


def test_what_was_never_learned_is_shown_as_unknown():
    """Ranks are compared with a small error all the same, because they are assumed alike."""
    fleet = Fleet(1, 2)
    assert fleet.row(1)[RATE_ERROR] > 5.0
    assert fleet.row(1)[RELATIVE_ERROR] == LEAST_SPREAD
    fleet.pass_seconds(60, working=[1])
    assert fleet.row(1)[RATE_ERROR] < 0.1
    assert fleet.row(2)[RATE_ERROR] < 0.6  # its model is known, and how much ranks differ is not


def polled(engine, *timed, **fields):
    counted = engine.report()
    return PolledLoad(
        worker_id=engine.worker_id,
        dp_rank=0,
        source_id=5,
        life_id=engine.incarnation,
        counters=replace(counted.counters, busy_s=0.0),
        gauges=counted.gauges,
        timed=timed,
        **fields,
    )


def test_polled_loads_teach_their_timed_work_alone():
    fleet = Fleet(1)
    engine, timed = fleet.engines[1], LoadCounters()
    for second in range(120):
        fleet.now_s += 1
        before = engine.report().counters
        engine.work(mixed_second(fleet.random))
        after = engine.report().counters
        if second % 2:  # of the rest the duration is not known
            pairs = zip(astuple(timed), astuple(after), astuple(before), strict=True)
            timed = LoadCounters(*[was + now - then for was, now, then in pairs])
        fleet.predictor.observe(polled(engine, TimedWork(timed, 0.05)), fleet.now_s)
    assert_predicts(fleet.rates(1), LARGE_S, rel=0.1)
    assert fleet.row(1)[RATE_ERROR] < 0.1
    engine.restart()
    engine.incarnation += 1
    fleet.predictor.observe(polled(engine, TimedWork(timed, 0.05)), fleet.now_s + 1)
    assert_predicts(fleet.rates(1), LARGE_S, rel=0.1)


def test_attention_of_polled_engines_is_learned_by_the_contexts_of_our_prompts():
    """Engines count no contexts, and estimate those of all prompts alike."""
    fleet, done_before = Fleet(1), np.zeros(5)
    engine = fleet.engines[1]
    for _ in range(200):
        engine.work(mixed_second(fleet.random))
        fleet.now_s += 1
        fleet.row(1)[[COMPLETED_TOKENS, COMPLETED_CONTEXTS]] += (engine.done - done_before)[1:3]
        done_before = engine.done.copy()
        estimated = 15_000.0 * engine.done[1]
        work = replace(engine.report().counters, prefill_token_contexts=estimated)
        fleet.predictor.observe(polled(engine, TimedWork(work, 0.05)), fleet.now_s)
    assert fleet.row(1)[CONTEXT_S] == pytest.approx(LARGE_S[2], rel=0.1)


@pytest.mark.parametrize("times", [0.3, 3.0])
def test_busy_time_that_contradicts_the_clock_is_corrected(times):
    fleet = Fleet(1, 2)
    fleet.engines[1].gauges = BUSY
    for _ in range(400):
        for worker_id, reported in ((1, times), (2, 1.0)):
            done = mixed_second(fleet.random)
            fleet.engines[worker_id].work(done, reported)
            fleet.now_s += float(done @ LARGE_S) * (worker_id == 1)
            fleet.predictor.observe(fleet.engines[worker_id].report(), fleet.now_s)
    assert_predicts(fleet.rates(1), LARGE_S, rel=0.1)
    assert_predicts(fleet.rates(2), LARGE_S, rel=0.1)


def test_too_many_kinds_of_timed_work_are_ignored():
    fleet = Fleet(1)
    fleet.engines[1].work(mixed_second(fleet.random))
    fleet.predictor.observe(polled(fleet.engines[1], *[TimedWork()] * 5), 1_001.0)
    assert fleet.row(1)[CHUNK_TOKENS] == 8_192
    assert fleet.row(1)[FOREIGN_REQUESTS] == 0


def test_reports_that_say_nothing_of_the_load_change_nothing():
    fleet = Fleet(1)
    engine = fleet.engines[1]
    engine.gauges = LoadGauges(running_requests=1)
    for _ in range(3):
        fleet.predictor.observe(polled(engine, TimedWork()), fleet.now_s)
    foreign = fleet.row(1)[FOREIGN_REQUESTS]
    assert foreign == 1
    silent = replace(
        engine.report(), counters=LoadCounters(), gauges=LoadGauges(), constants=LoadConstants()
    )
    fleet.predictor.observe(silent, fleet.now_s)
    assert fleet.row(1)[FOREIGN_REQUESTS] == foreign


def first_token(random, seconds, late=1.0):
    tokens = random.randint(1_000, 9_000)
    contexts = tokens * tokens / 2
    steps = -(-tokens // 8_192)
    waited_s = np.array([steps, tokens, contexts, 0.0, 0.0]) @ seconds
    return FirstToken(waited_s * late, tokens, contexts, 0.0, 0.0)


def test_first_tokens_teach_without_any_report():
    fleet = Fleet(1, 2)
    for _ in range(300):
        fleet.now_s += 1
        late = fleet.random.choice([1.0, 1.0, 1.2, 2.0, 5.0])  # callers report late, never early
        token = first_token(fleet.random, LARGE_S, late)
        fleet.predictor.add_first_tokens([(Rank(1, 0), token)], fleet.now_s)
    for worker_id in (1, 2):
        rates = fleet.rates(worker_id)
        done = np.array([1.0, 5_000.0, 5_000.0**2 / 2, 0.0, 0.0])
        assert done @ rates == pytest.approx(done @ LARGE_S, rel=0.1)
    fleet.predictor.check_invariants()


def test_first_tokens_do_not_matter_where_the_engine_measures_its_work():
    fleet = Fleet(1)
    fleet.pass_seconds(60, working=[1])
    known = fleet.row(1).copy()
    for _ in range(100):
        token = first_token(fleet.random, 3 * LARGE_S)
        fleet.predictor.add_first_tokens([(Rank(1, 0), token)], fleet.now_s)
    assert (fleet.row(1) == known).all()


def test_first_tokens_of_unknown_ranks_are_ignored():
    fleet = Fleet(1)
    token = first_token(fleet.random, LARGE_S)
    fleet.predictor.add_first_tokens([(Rank(9, 0), token)], fleet.now_s)


def test_learns_from_a_cold_start():
    fleet = Fleet(1, 2)
    fleet.pass_seconds(60, working=[1, 2])
    for worker_id in (1, 2):
        assert_predicts(fleet.rates(worker_id), LARGE_S)
        assert fleet.row(worker_id)[RELATIVE_ERROR] < 0.1


def test_a_cold_rank_takes_what_its_peers_take():
    fleet = Fleet(1, 2)
    fleet.pass_seconds(60, working=[1, 2])
    fleet.join(3)
    fleet.join(4, model="another")
    assert_predicts(fleet.rates(3), LARGE_S)
    assert fleet.rates(4) == pytest.approx(NOMINAL_S)


def test_ranks_without_reports_are_estimated_alike():
    fleet = Fleet(1, 2)
    assert fleet.row(1)[RELATIVE_ERROR] < 0.1


def test_a_rank_that_never_reports_follows_its_peers():
    fleet = Fleet(1, 2, 3)
    del fleet.engines[3]
    fleet.row(3)[MAX_BATCHED_TOKENS] = 4_096
    fleet.predictor.note_announced(Rank(3, 0))
    fleet.pass_seconds(60, working=[1, 2])
    assert_predicts(fleet.rates(3), LARGE_S)
    assert fleet.row(3)[CHUNK_TOKENS] == 4_096


def test_idle_rank_is_estimated_as_its_peers():
    """Else the first rank that works looks slow beside ranks that are only assumed to be fast."""
    fleet = Fleet(1, 2, 3)
    del fleet.engines[3]
    fleet.pass_seconds(2, working=[1])
    model_s = fleet.usual_rates()
    assert model_s != pytest.approx(NOMINAL_S, rel=0.1)
    for worker_id in (2, 3):
        assert fleet.rates(worker_id) == pytest.approx(model_s)
    random = Random(8)
    done = sum(mixed_second(random) for _ in range(20))
    assert done @ fleet.rates(1) == pytest.approx(done @ model_s, rel=0.2)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_slow_ranks_are_known_to_be_slow(seed):
    fleet = Fleet(*range(8), seed=seed)
    for worker_id in range(4):
        fleet.engines[worker_id].seconds = 2 * LARGE_S
    fleet.pass_seconds(30, working=range(8))
    for worker_id in range(4):
        assert_predicts(fleet.rates(worker_id), 2 * LARGE_S, rel=0.1)
        assert_predicts(fleet.rates(worker_id + 4), LARGE_S, rel=0.1)


def test_without_work_a_slow_rank_is_forgiven_within_a_minute():
    fleet = Fleet(1, 2, 3, 4)
    fleet.engines[4].seconds = 3 * LARGE_S
    fleet.pass_seconds(60, working=[1, 2, 3, 4])
    fleet.pass_seconds(60, working=[1, 2, 3])
    assert_predicts(fleet.rates(4), fleet.usual_rates(), rel=0.1)
    assert fleet.row(4)[RELATIVE_ERROR] > 0.1 > fleet.row(1)[RELATIVE_ERROR]


def test_ranks_are_as_unsure_as_they_differ():
    alike, unlike = Fleet(1, 2, 3, 4), Fleet(1, 2, 3, 4)
    unlike.engines[1].seconds = 2 * LARGE_S
    unlike.engines[2].seconds = LARGE_S / 2
    for fleet in (alike, unlike):
        fleet.pass_seconds(120, working=[1, 2, 3, 4])
        fleet.pass_seconds(60, working=[1, 2, 3])
    assert alike.row(4)[RELATIVE_ERROR] < 0.1
    assert unlike.row(4)[RELATIVE_ERROR] > 0.3


def test_a_rank_that_slows_down_is_noticed_within_three_reports():
    fleet = Fleet(1, 2, 3)
    fleet.pass_seconds(60, working=[1, 2, 3])
    fleet.engines[2].seconds = 2 * LARGE_S
    fleet.pass_seconds(3, working=[1, 2, 3])
    assert_predicts(fleet.rates(2), 2 * LARGE_S, rel=0.15)
    assert_predicts(fleet.rates(1), LARGE_S)


@pytest.mark.parametrize("is_agent_new", [True, False])
def test_an_engine_that_starts_anew_teaches_on(is_agent_new):
    fleet = Fleet(1)
    fleet.pass_seconds(30, working=[1])
    fleet.engines[1].restart()
    fleet.engines[1].incarnation += is_agent_new
    fleet.pass_seconds(10, working=[1])
    assert_predicts(fleet.rates(1), LARGE_S)


def test_lost_reports_cost_nothing():
    fleet = Fleet(1)
    for _ in range(30):
        for _ in range(fleet.random.randint(0, 5)):
            fleet.engines[1].work(mixed_second(fleet.random))
            fleet.now_s += 1
        fleet.pass_seconds(1, working=[1])
    assert_predicts(fleet.rates(1), LARGE_S)


def test_uncounted_work_is_part_of_the_token_time():
    fleet = Fleet(1)
    fleet.engines[1].seconds = LARGE_S * [1, 1, 1, 0, 0]
    for _ in range(60):
        fleet.now_s += 1
        fleet.engines[1].work(np.array([8.0, 8_000.0, 4e7, 0.0, 0.0]))
        fleet.predictor.observe(
            fleet.engines[1].report(steps=0, prefill_token_contexts=0.0), fleet.now_s
        )
    row = fleet.row(1)
    assert (row[BASE_S], row[CONTEXT_S]) == (0, 0)
    assert row[PREFILL_S] * 8_000 == pytest.approx(
        8 * 0.02 + 8_000 / 9_000 + 4e7 * 1.85e-9, rel=0.02
    )
    assert row[DECODE_S] > 0 < row[KV_S]


def test_an_engine_that_measures_nothing_is_timed_while_it_works():
    fleet = Fleet(1)
    fleet.engines[1].gauges = BUSY
    for _ in range(120):
        done = mixed_second(fleet.random)
        fleet.now_s += float(done @ LARGE_S)
        fleet.engines[1].work(done)
        fleet.predictor.observe(fleet.engines[1].report(busy_s=0.0), fleet.now_s)
    assert_predicts(fleet.rates(1), LARGE_S)


def test_invalid_reports_teach_nothing():
    fleet = Fleet(1)
    fleet.pass_seconds(30, working=[1])
    before = fleet.row(1).copy()
    fleet.pass_seconds(5, working=[1], busy_s=float("nan"))
    fleet.pass_seconds(5, working=[1], prefill_token_contexts=float("inf"))
    assert (fleet.row(1) == before).all()


def test_traffic_is_of_the_rank():
    fleet = Fleet(1)
    for _ in range(30):
        engine = fleet.engines[1]
        engine.work(np.array([10.0, 1_000.0, 1e6, 200.0, 1e6]))
        engine.received, engine.finished = engine.received + 3, engine.finished + 2
        engine.cached += 500
        fleet.pass_seconds(1, working=[])
    row = fleet.row(1)
    assert row[REQUESTS_PER_S] == pytest.approx(3)
    assert row[OUTPUT_TOKENS] == pytest.approx(100)
    assert row[REUSE] == pytest.approx(0.5)
    assert row[PREFILL_SHARE] == pytest.approx(1_000 / 9_000 + 1e6 * 1.85e-9, rel=0.3)
    assert row[CHUNK_TOKENS] == 2_048


def test_foreign_work_keeps_a_rank_busy():
    fleet = Fleet(1)
    row = fleet.row(1)
    row[REQUESTS], row[PREFILL_TOKENS], row[QUEUED_TOKENS] = 3, 1_000, 1_000
    fleet.engines[1].gauges = LoadGauges(
        running_requests=4, waiting_requests=2, waiting_uncached_tokens=5_000
    )
    fleet.pass_seconds(2, working=[])
    assert (row[FOREIGN_REQUESTS], row[FOREIGN_TOKENS]) == (0, 0)
    fleet.pass_seconds(1, working=[])
    assert (row[FOREIGN_REQUESTS], row[FOREIGN_TOKENS]) == (3, 4_000)


def test_equal_prompts_that_wait_are_not_foreign():
    """Engines count a prompt that waits in full, though its blocks are being computed."""
    fleet = Fleet(1)
    row = fleet.row(1)
    row[REQUESTS], row[PREFILL_TOKENS], row[QUEUED_TOKENS] = 16, 480_000, 30_000
    fleet.engines[1].gauges = LoadGauges(
        running_requests=1, waiting_requests=15, waiting_uncached_tokens=450_000
    )
    fleet.pass_seconds(3, working=[])
    assert (row[FOREIGN_REQUESTS], row[FOREIGN_TOKENS]) == (0, 0)


def test_finished_work_is_subtracted_from_bookings():
    fleet = Fleet(1)
    row = fleet.row(1)
    row[REQUESTS], row[PREFILL_TOKENS], row[QUEUED_TOKENS] = 9, 1_000, 1_000
    fleet.engines[1].gauges = LoadGauges(running_requests=4)
    fleet.pass_seconds(3, working=[])
    assert (row[FOREIGN_REQUESTS], row[FOREIGN_TOKENS]) == (-5, 0)


def test_an_engine_that_says_nothing_takes_nothing_off():
    fleet = Fleet(1)
    row = fleet.row(1)
    row[REQUESTS] = 9
    fleet.engines[1].gauges = LoadGauges()
    fleet.pass_seconds(5, working=[])
    assert row[FOREIGN_REQUESTS] == 0


def test_a_new_rank_starts_slowly_from_when_it_appears():
    fleet = Fleet(1, 2, 3)
    fleet.engines[2].finished = 100
    silent = fleet.engines.pop(3)
    fleet.pass_seconds(10, working=[1, 2])
    assert [fleet.row(each)[SLOW_UNTIL_S] for each in (1, 2, 3)] == [1_030, 0, 1_030]
    fleet.engines[1].finished = 7
    fleet.engines[3] = silent
    fleet.pass_seconds(10, working=[1, 2, 3])
    assert [fleet.row(each)[SLOW_UNTIL_S] for each in (1, 2, 3)] == [1_030, 0, 1_030]


def test_an_engine_that_starts_anew_starts_slowly_again():
    fleet = Fleet(1)
    fleet.engines[1].finished = 100
    fleet.pass_seconds(10, working=[1])
    fleet.engines[1].restart()
    fleet.pass_seconds(1, working=[1])
    assert fleet.row(1)[SLOW_UNTIL_S] == 1_011 + 30


def test_unreported_rank_is_not_preferred_to_a_new_one():
    """Both are new; half a slow start later both count one and a half times."""
    fleet = Fleet(1, 2)
    fleet.row(1)[MAX_BATCHED_TOKENS] = 2_048  # as the other says
    del fleet.engines[1]
    fleet.pass_seconds(1, working=[])
    costs = []
    for now_s in (1_001.0, 1_015.0, 1_030.0):
        rows = np.stack([candidate(), candidate()])
        rows[:, :RANK_COLUMNS] = [fleet.row(1), fleet.row(2)]
        asked = replace(table(*rows), now_s=now_s)
        costs.append(Predictive().score(asked, PolicySettings()))
    assert costs[0] / costs[2] == pytest.approx(59 / 30)
    assert costs[1] / costs[2] == pytest.approx(1.5)
    assert costs[2][0] == pytest.approx(costs[2][1])


def test_models_without_ranks_are_kept_up_to_a_limit():
    fleet = Fleet(1)
    fleet.pass_seconds(60, working=[1])
    fleet.predictor.drop(Rank(1, 0))
    assert_predicts(fleet.usual_rates(), LARGE_S)
    for worker_id in range(2, MOST_MODELS + 2):
        fleet.join(worker_id, model=f"m{worker_id}")
    fleet.join(1)
    fleet.predictor.drop(Rank(1, 0))
    assert fleet.usual_rates() == pytest.approx(NOMINAL_S)


def test_reports_of_a_dropped_rank_are_ignored():
    fleet = Fleet(1, 2)
    fleet.pass_seconds(5, working=[1])
    fleet.predictor.drop(Rank(2, 0))
    fleet.predictor.drop(Rank(2, 0))
    fleet.table.drop(Rank(2, 0))
    fleet.pass_seconds(5, working=[1, 2])
    assert Rank(2, 0) not in fleet.table
