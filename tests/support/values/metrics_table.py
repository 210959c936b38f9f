"""Every metric of a router; run as a program, this writes `router/observability/METRICS.md`."""

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from router.config.router import RouterConfig
from router.forward.config import ForwardConfig
from router.forward.metrics import POOL_METRICS, PREFILL_METRICS, PREFIX
from router.forward.picker.metrics import PICKER_METRICS, PickerMetrics
from router.forward.picker.metrics import PREFIX as PICKER_PREFIX
from router.forward.prefill.pools import PrefillPools
from router.forward.service import ForwardService
from router.runtime.process.metrics import expose
from router.runtime.process.settings import configured
from router.service.router import RouterService

FILE = Path(__file__).parents[3] / "router/observability/METRICS.md"
HEAD = """# Metrics

Every metric of a router, on `GET /metrics`. A test holds this list against what routers have; after
a change, `PYTHONPATH=.:tests python tests/support/values/metrics_table.py` writes it anew. Names
are `kv_router_…`, and `kv_engine_…` for what a router that reads engines itself counts of each;
times end in `_seconds`, counters in `_total`. Those with a `worker_id` are of `metrics_max_ranks`
ranks at most. `kv_router_forward_…` are those of `kv-router forward`, and of a router with
`openai_port`.

"""
COLUMNS = ["| metric | kind | labels | what |", "|---|---|---|---|"]


def families():
    """Of every kind of router: {name: (kind, labels, text)}."""
    with tempfile.TemporaryDirectory() as folder:
        bus = {"nats_url": "nats://127.0.0.1:1"}
        every = [
            configured(
                RouterConfig,
                **bus,
                session_affinity_ttl_s=1.0,
                decision_log=f"{folder}/d",
                otlp_endpoint="http://127.0.0.1:1",
                discovery="pods",
                discovery_selector="app=vllm",
                discovery_namespace="n",
                discovery_api_url="http://127.0.0.1:1",
            ),
            configured(RouterConfig, router_service="n/s", discovery_api_url="http://127.0.0.1:1"),
            configured(
                RouterConfig,
                **bus,
                shadow=True,
                dynamo_namespace="n",
                dynamo_component="c",
                dynamo_block_size=16,
            ),
        ]
        registries = [RouterService(config).host.metrics.registry for config in every]
    registries.append(forwarding())
    return {name: text for registry in registries for name, text in _texts(registry)}


def forwarding():
    registry = ForwardService(ForwardConfig()).metrics.registry
    expose(registry, PREFIX, POOL_METRICS, SimpleNamespace(open_connections=0))
    expose(registry, PREFIX, PREFILL_METRICS, PrefillPools())
    PickerMetrics(registry)
    counts = SimpleNamespace(open_streams=0, body_bytes=0, requests=SimpleNamespace(count=0))
    expose(registry, PICKER_PREFIX, PICKER_METRICS, counts)
    return registry


def _texts(registry):
    for family in registry.collect():
        made = registry._names_to_collectors.get(family.name)
        labels = getattr(family, "_labelnames", None) or getattr(made, "_labelnames", ())
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        yield name, (family.type, ", ".join(labels), family.documentation)


def table():
    rows = [
        f"| `{name}` | {kind} | {labels} | {text} |"
        for name, (kind, labels, text) in sorted(families().items())
    ]
    return (
        HEAD + "\n".join(["| metric | kind | labels | what |", "|---|---|---|---|", *rows]) + "\n"
    )


if __name__ == "__main__":
    FILE.write_text(table())
    sys.stdout.write(f"{FILE}\n")
