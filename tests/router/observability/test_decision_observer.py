"""What is noted of decisions."""

import json

from router.observability.decision_metrics import DecisionTotals
from router.observability.decision_observer import TIMED_APART_S, TIMED_EVERY, DecisionObserver
from support.processes.running import RunningRouter


def timed(count, apart_s):
    """The decisions that are timed, of `count` decisions `apart_s` apart."""
    now_s = 0.0
    watch = DecisionObserver(DecisionTotals(), clock=lambda: now_s)
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
