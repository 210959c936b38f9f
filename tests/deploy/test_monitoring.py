"""Panels and alerts ask for metrics that live processes have, and alerts fire when they should."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from support.processes.processes import Fleet, Process
from support.processes.servers import eventually, free_port
from support.values import dashboards
from support.values.charts import DEPLOY
from support.values.metrics_table import families

ALERTS = DEPLOY / "chart/files/alerts.yaml"
UNIT_TESTS = Path(__file__).with_name("alerts.test.yaml")
FETCHED = DEPLOY.parent / ".promtool/usr/bin/promtool"
ADAPTER = yaml.safe_load((DEPLOY / "adapter-rules.yaml").read_text())
RULES = [each for group in yaml.safe_load(ALERTS.read_text())["groups"] for each in group["rules"]]
OF_TARGETS = {"instance", "job", "namespace", "pod", "le"}
"""Labels that Prometheus adds, and that of histograms."""
OF_HISTOGRAMS = ("_bucket", "_sum", "_count")


def queries():
    """Of panels, alerts and the autoscaler: (where, query)."""
    for panels in dashboards.ROWS.values():
        for title, _, _, asked in panels:
            for expr in asked.values():
                yield title, expr.replace("$__rate_interval", "5m").replace("$router", "a.*")
    for rule in RULES:
        yield rule["alert"], rule["expr"]
    for each in ADAPTER:
        matchers = each["seriesQuery"].partition("{")[2].rstrip("}")
        query = each["metricsQuery"].replace("<<.GroupBy>>", "pod")
        yield "adapter", query.replace("<<.LabelMatchers>>", matchers)


def nodes(node):
    """A parsed query, part by part."""
    yield node
    for name in ("lhs", "rhs", "expr", "vector_selector", "args"):
        child = getattr(node, name, None)
        for each in child if isinstance(child, list) else [child]:
            if each is not None:
                yield from nodes(each)


def asked(query):
    """The metrics that a query selects, and the labels that it names."""
    metrics, labels = set(), set()
    for node in nodes(promql_parser.parse(query)):
        if isinstance(node, promql_parser.VectorSelector):
            metrics.add(node.name)
            labels |= {each.name for each in node.matchers.matchers}
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            labels |= set(node.modifier.labels)
    return metrics, labels


def exposed(texts):
    """What processes expose: {sample: its labels}, those included that have no sample yet."""
    listed = {
        name: set(filter(None, reported[1].split(", "))) for name, reported in families().items()
    }
    known = {}
    for family in (each for text in texts for each in text_string_to_metric_families(text)):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels}
        labels |= listed.get(name, set())
        suffixes = OF_HISTOGRAMS if family.type == "histogram" else ("",)
        for suffix in suffixes:
            known[name + suffix] = known.get(name + suffix, set()) | labels
    return known


async def live_metrics(tmp_path, nats_url):
    """Of a router with an endpoint, an index alone, an agent with tiers, one beside an engine."""
    fleet = Fleet(tmp_path, nats_url, **{"openai-port": free_port()})
    ports = {"indexer": free_port(), "bridge": free_port(), "peer": free_port()}
    others = [
        Process(
            tmp_path, "peer", "router", "serve",
            **{"http-port": ports["peer"], "router-peers": "127.0.0.1:1"},
        ),
        Process(
            tmp_path, "indexer", "router", "indexer",
            **{"nats-url": nats_url, "http-port": ports["indexer"]},
        ),
        Process(
            tmp_path, "bridge", "worker_agent", "run",
            **{"nats-url": nats_url, "http-port": ports["bridge"], "engine": "vllm",
               "worker-id": 9, "endpoint": "http://127.0.0.1:1", "block-size": 16,
               "total-kv-blocks": 64},
        ),
    ]  # fmt: skip
    try:
        await fleet.start(1, **{"host-cache-blocks": 64, "disk-cache-blocks": 64})
        await fleet.ask(list(range(64)))
        urls = [fleet.url, fleet.endpoints[1]]
        urls += [f"http://127.0.0.1:{port}" for port in ports.values()]

        async def answers(url):
            try:
                return (await fleet.client.get(f"{url}/metrics")).text
            except httpx.HTTPError:
                return None

        return [await eventually(lambda url=url: answers(url)) for url in urls]
    finally:
        for each in others:
            each.end()
        await fleet.close()


@pytest.mark.integration
async def test_nothing_asks_for_a_metric_or_a_label_that_does_not_exist(tmp_path, nats_server):
    known = exposed(await live_metrics(tmp_path, nats_server.url))
    wrong = []
    for where, query in queries():
        metrics, labels = asked(query)
        assert metrics, query
        wrong += [f"{where}: no metric {name}" for name in metrics - known.keys()]
        has = OF_TARGETS.union(*(known.get(name, set()) for name in metrics))
        wrong += [f"{where}: no label {name} in {query}" for name in labels - has]
    assert wrong == []


def test_legends_name_labels_that_their_queries_keep():
    for panels in dashboards.ROWS.values():
        for title, _, _, queries_of in panels:
            for legend, expr in queries_of.items():
                named = set(legend.split("{{")[1:])
                named = {each.partition("}}")[0] for each in named}
                kept = asked(expr.replace("$__rate_interval", "5m"))[1]
                is_plain = not re.search(r"\b(sum|max|histogram_quantile)\b", expr)
                assert is_plain or named <= kept, f"{title}: {legend}"


def test_the_dashboard_is_as_it_is_described():
    """`make manifests` writes it anew."""
    assert dashboards.FILE.read_text() == dashboards.text()
    panels = dashboards.dashboard()["panels"]
    places = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels}
    assert len(places) == len({p["id"] for p in panels}) == len(panels)


def test_every_alert_says_how_bad_it_is_and_what_to_do():
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_every_alert_has_a_test_that_it_fires():
    fired = set()
    for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"]:
        for each in test["promql_expr_test"]:
            fired |= {rule["alert"] for rule in RULES if rule["alert"] in each["expr"]
                      and each["exp_samples"]}  # fmt: skip
    assert fired == {rule["alert"] for rule in RULES}


def test_alerts_fire_when_they_should(tmp_path):
    """By promtool, which `make test` fetches where Debian's packages can be had."""
    promtool = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if promtool is None and FETCHED.exists():
        promtool = str(FETCHED)
    if promtool is None:
        pytest.skip("no promtool: neither installed nor could `make promtool` fetch it")
    for arguments in (["check", "rules", str(ALERTS)], ["test", "rules", str(UNIT_TESTS)]):
        done = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
