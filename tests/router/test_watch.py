"""What is noted of decisions."""

import json

from prometheus_client import CollectorRegistry

from router.decision_metrics import DecisionMetrics
from router.watch import TIMED_APART_S, TIMED_EVERY, Watch
from running import RunningRouter


def timed(count, apart_s):
    """Which of so many decisions are timed that come so far apart."""
    now_s = 0.0
    watch = Watch(DecisionMetrics(CollectorRegistry()), clock=lambda: now_s)
    found = []
    for number in range(count):
        now_s = number * apart_s
        if watch.begin() is not None:
            found.append(number)
    return found


def test_one_decision_in_32_is_timed_the_first_among_them():
    assert timed(2 * TIMED_EVERY, apart_s=1.0) == [0, TIMED_EVERY]


def test_of_many_in_a_second_ten_are_timed():
    assert timed(8 * TIMED_EVERY, TIMED_APART_S / 2 / TIMED_EVERY) == [
        turn * TIMED_EVERY for turn in (0, 2, 4, 6)
    ]


def test_plain_requests_are_timed_in_their_turn_and_seldom():
    now_s, timed = 0.0, []
    watch = Watch(DecisionMetrics(CollectorRegistry()), clock=lambda: now_s)
    for number in range(8 * TIMED_EVERY):
        now_s = number * TIMED_APART_S / 2 / TIMED_EVERY
        if not watch.begin_plain() and watch.begin() is not None:
            timed.append(number)
    assert timed == [turn * TIMED_EVERY for turn in (0, 2, 4, 6)]


def test_whoever_looks_sees_plain_requests_too():
    watch = Watch(DecisionMetrics(CollectorRegistry()))
    watch.begin()
    assert watch.begin_plain()
    watch.onlooker = lambda *_: None
    assert not watch.begin_plain()


async def test_a_router_counts_times_and_writes_down_decisions(nats_server, tmp_path, eventually):
    path = tmp_path / "decisions.jsonl"
    fields = {"decision_log": str(path), "decision_log_per_s": 0.001}
    async with RunningRouter(nats_server.url, **fields).running() as router:
        await router.worker(1)
        for name in ("a", "b"):
            body = {"token_ids": [*range(8)], "request_id": name}
            assert (await router.post("/select_and_reserve", body)).status_code == 200
        await eventually(lambda: len(path.read_text().splitlines()) == 1)
        line = json.loads(path.read_text())
        assert (line["request_id"], line["worker_id"]) == ("a", 1)
        assert await router.metric("kv_router_decision_log_written_total") == 1
        assert await router.metric("kv_router_decision_log_skipped_total") == 1
        decided = 'kv_router_decisions_total{command="select_and_reserve"}'
        assert await router.metric(decided) == 2
        stage = 'kv_router_decision_stage_seconds_count{stage="%s",worker_type="aggregated"}'
        for name in ("block_hashing", "sequence_hashing", "find", "scheduling"):
            assert await router.metric(stage % name) == 1
