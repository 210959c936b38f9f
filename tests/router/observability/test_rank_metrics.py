"""Metrics of ranks; and the list of all metrics."""

import re

from prometheus_client import CollectorRegistry

from router.observability.rank_metrics import expose_ranks
from support.values.builders import World, rank
from support.values.metrics_table import FILE, families, table


def shown(world, max_ranks=1024):
    registry = CollectorRegistry()
    expose_ranks(registry, world.core, max_ranks, lambda: 1.0)
    return registry


def test_every_metric_is_listed_and_every_listed_one_exists():
    """`PYTHONPATH=.:tests python tests/support/values/metrics_table.py` writes the list anew."""
    assert FILE.read_text() == table()


def test_names_keep_the_conventions():
    for name, (kind, _, text) in families().items():
        assert re.fullmatch(r"kv_(router|engine)_[a-z0-9_]+", name), name
        assert not re.search(r"_(ms|secs?|minutes|kb|mb)(_|$)", name), name
        assert (kind == "counter") == name.endswith("_total"), name
        assert (kind == "info") == name.endswith("_info"), name
        assert (kind == "histogram") <= name.endswith("_seconds"), name
        assert text, name


def test_each_rank_shows_its_state():
    world = World()
    world.worker(1, data_parallel_size=2)
    world.cache(rank(1, 1), [*range(40)])
    world.book("x", [*range(40)])
    registry = shown(world)

    def value(name, **labels):
        return registry.get_sample_value(
            f"kv_router_worker_{name}", {"worker_id": "1", "dp_rank": "1", **labels}
        )

    assert (value("held_blocks"), value("active_requests")) == (10, 1)
    assert (value("active_prefill_tokens"), value("active_decode_blocks")) == (0, 10)
    assert value("trust", state="exact") == 1
    assert value("rate_seconds", work="prompt_token") > 0
    assert registry.get_sample_value("kv_router_worker_gauges_hidden") == 0


def test_ranks_beyond_the_limit_are_hidden_and_counted():
    world = World()
    for worker_id in range(1, 6):
        world.worker(worker_id)
    registry = shown(world, max_ranks=2)
    names = {each.labels["worker_id"] for family in registry.collect() for each in family.samples
             if "worker_id" in each.labels}  # fmt: skip
    assert names == {"1", "2"}
    assert registry.get_sample_value("kv_router_worker_gauges_hidden") == 3


def test_workers_are_named():
    world = World()
    world.worker(7, model_name="m", routing_group="g")
    labels = {"worker_id": "7", "name": "w7", "model_name": "m", "routing_group": "g"}
    assert shown(world).get_sample_value("kv_router_worker_info", labels) == 1
