"""What is noted of decisions."""

import json

from prometheus_client import CollectorRegistry

from router.decision_metrics import DecisionMetrics
from router.watch import TIMED_EVERY, Watch
from running import RunningRouter


def test_one_decision_in_eight_is_timed_the_first_among_them():
    watch = Watch(DecisionMetrics(CollectorRegistry()))
    timed = [watch.begin() is not None for _ in range(2 * TIMED_EVERY)]
    assert [i for i, each in enumerate(timed) if each] == [0, TIMED_EVERY]


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
