"""The Grafana dashboard, `deploy/chart/files/dashboard.json`; `make manifests` writes it anew."""

import json
import sys
from pathlib import Path

FILE = Path(__file__).parents[3] / "deploy/chart/files/dashboard.json"
ROUTERS = 'instance=~"$router"'
SOURCE = {"type": "prometheus", "uid": "${source}"}
COLUMNS, WIDTH, HEIGHT = 3, 8, 8


def _rate(metric, by=""):
    summed = f"sum by ({by}) " if by else "sum"
    return f"{summed}(rate({metric}{{{ROUTERS}}}[$__rate_interval]))"


def _quantile(q, metric, by=""):
    labels = f"le, {by}" if by else "le"
    rate = f"sum by ({labels}) (rate({metric}_bucket{{{ROUTERS}}}[$__rate_interval]))"
    return f"histogram_quantile({q}, {rate})"


def _ranks(metric, labels="worker_id, dp_rank"):
    """Every router shows every rank: what most of them show counts once."""
    return f"max by ({labels}) ({metric}{{{ROUTERS}}})"


def _pools(metric, labels="model_name, role"):
    """Routers that share their bookings show the same: it counts once."""
    return f"max by ({labels}) ({metric}{{{ROUTERS}}})"


def _agents(metric, by="pod, dp_rank"):
    return f"sum by ({by}) (rate({metric}[$__rate_interval]))"


def _forward(metric, by, q=None):
    """Of forwarders, which are routers with an endpoint, or processes of their own."""
    name = f"kv_router_forward_{metric}" + ("" if q is None else "_bucket")
    rate = f"sum by ({by if q is None else f'le, {by}'}) (rate({name}[$__rate_interval]))"
    return rate if q is None else f"histogram_quantile({q}, {rate})"


PROMPTS, USAGE = "kv_router_prompt_tokens_total", "kv_router_usage_prompt_tokens_total"

# Rows of panels: (title, what to look at, unit, {legend: query}).
ROWS = {
    "Does it help": [
        ("Prompt tokens already cached where they were sent",
         "Predicted: of all decisions. The others: of requests whose usage callers report, what "
         "was predicted of them and what engines then had.",
         "percentunit", {
             "predicted, all": f"{_rate('kv_router_predicted_cached_tokens_total')}"
                               f" / {_rate(PROMPTS)}",
             "predicted, with usage": f"{_rate('kv_router_usage_predicted_cached_tokens_total')}"
                                      f" / {_rate(USAGE)}",
             "actual": f"{_rate('kv_router_usage_cached_tokens_total')} / {_rate(USAGE)}",
         }),
        ("Prompt tokens a second", "What was asked, and what of it nobody has to compute.",
         "short", {
             "asked": _rate(PROMPTS),
             "not computed": _rate("kv_router_predicted_cached_tokens_total"),
         }),
        ("Mispredicted", "Share of prompt tokens by which prediction and engine differ, request by "
         "request. Above a few per cent: look at trust below.",
         "percentunit", {
             "mispredicted": f"{_rate('kv_router_usage_mispredicted_tokens_total')}"
                             f" / {_rate(USAGE)}",
         }),
    ],
    "Decisions": [
        ("Decisions a second", "", "reqps", {"{{command}}": _rate("kv_router_decisions_total",
                                                                   "command")}),
        ("Time of a decision", "Hashing, matching, weighing and booking, of one in 32.", "s", {
            "p50": _quantile(0.5, "kv_router_decision_seconds"),
            "p99": _quantile(0.99, "kv_router_decision_seconds"),
            "{{stage}} p99": _quantile(0.99, "kv_router_decision_stage_seconds", "stage"),
        }),
        ("Refused a second", "429: a tenant's queue or rate. 503: no worker, or a limit. 529: "
         "everybody is busy.", "reqps",
         {"{{interface}} {{code}}": _rate("kv_router_refusals_total", "interface, code")}),
        ("Waiting requests", "Only where router_queue_threshold is set.", "short", {
            "{{policy_class}}": f"sum by (policy_class) (kv_router_waiting_requests{{{ROUTERS}}})",
            "limit": f"sum(kv_router_waiting_requests_max{{{ROUTERS}}})",
        }),
        ("Time in the queue", "Of those that waited and were placed.", "s", {
            "p50": _quantile(0.5, "kv_router_wait_seconds"),
            "p99": _quantile(0.99, "kv_router_wait_seconds"),
        }),
        ("Objectives met", "Of requests with objectives that are over and whose outcome is known: "
         "the share that met them.", "percentunit", {
             "{{model_name}} {{policy_class}}": "{} / {}".format(*(
                 "sum by (model_name, policy_class) (rate(kv_router_slo_requests_total"
                 f"{{{ROUTERS}, {outcomes}}}[$__rate_interval]))"
                 for outcomes in ('outcome="met"', 'outcome!="unknown"'))),
         }),
        ("Reservations", "Dropped: bookings that ended without being freed; expired ones are "
         "callers that forget to.", "short", {
             "live": f"max(kv_router_reservations{{{ROUTERS}}})",
             "dropped a second: {{reason}}": _rate("kv_router_reservations_dropped_total",
                                                   "reason"),
         }),
    ],
    "OpenAI endpoint": [
        ("Latency by model", "From the choice of a worker to the end of its response.", "s", {
            "p50 {{model}}": _forward("attempt_seconds", "model", 0.5),
            "p99 {{model}}": _forward("attempt_seconds", "model", 0.99),
            "first token p99 {{instance}}": _forward(
                "time_to_first_token_seconds", "instance", 0.99),
        }),
        ("Mean latency by worker", "The ten slowest. One far above the others: look at its load, "
         "then cordon it.", "s", {
             "{{worker_id}}": "topk(10, {} / {})".format(
                 _forward("worker_seconds_total", "worker_id"),
                 _forward("worker_attempts_total", "worker_id")),
         }),
        ("Errors", "Share of attempts by the engine's status (failed: none, or cut off), and of "
         "requests that clients saw fail.", "percentunit", {
             "attempts {{status}}": "{} / scalar({})".format(
                 _forward("worker_attempts_total", "status").replace(
                     "_total[", '_total{status!="200"}['),
                 "sum(rate(kv_router_forward_worker_attempts_total[$__rate_interval]))"),
             "requests {{ended}}": "{} / scalar({})".format(
                 _forward("requests_total", "ended").replace(
                     "_total[", '_total{ended=~"failed|broke_off|refused"}['),
                 "sum(rate(kv_router_forward_requests_total[$__rate_interval]))"),
         }),
        ("Failures by worker", "", "short", {
            "{{worker_id}} {{status}}": _forward(
                "worker_attempts_total", "worker_id, status").replace(
                    "_total[", '_total{status=~"failed|5.."}['),
        }),
        ("Output tokens a second", "As engines report them.", "short", {
            "{{model}}": _forward("output_tokens_total", "model")}),
        ("Saturation", "Requests in flight (limit: max_connections), and connections to engines. "
         "Ejected workers get no requests for a while.", "short", {
             "in flight {{instance}}": "sum by (instance) (kv_router_forward_in_flight)",
             "connections {{instance}}":
                 "sum by (instance) (kv_router_forward_engine_connections)",
             "ejected workers {{instance}}":
                 "sum by (instance) (kv_router_forward_ejected_workers)",
         }),
    ],
    "Workers": [
        ("Active requests", "", "short", {"{{worker_id}}.{{dp_rank}}": _ranks(
            "kv_router_worker_active_requests")}),
        ("Prompt tokens left to compute", "", "short", {"{{worker_id}}.{{dp_rank}}": _ranks(
            "kv_router_worker_active_prefill_tokens")}),
        ("Blocks held", "Once a tier.", "short", {"{{worker_id}}.{{dp_rank}}": _ranks(
            "kv_router_worker_held_blocks")}),
        ("Ranks by trust", "Anything but exact for long: events are behind, lost, or not there.",
         "short", {"{{state}}": f"sum by (state) ("
                   f"{_ranks('kv_router_worker_trust', 'worker_id, dp_rank, state')})"}),
        ("Workers", "", "short", {
            "known": f"max(kv_router_workers{{{ROUTERS}}})",
            "busy ranks": f"sum({_ranks('kv_router_worker_busy')})",
            "gone a second: {{reason}}": _rate("kv_router_workers_gone_total", "reason"),
        }),
        ("Error of learned rates", "Standard error of predicted times, as a fraction. Stays high "
         "where a worker's load reports do not come.", "percentunit",
         {"{{worker_id}}.{{dp_rank}}": _ranks("kv_router_worker_rate_relative_error")}),
    ],
    "Scaling": [
        ("Saturation", "Demand in seconds of a rank per second, divided by the schedulable ranks. "
         "1: all that they can serve. Peak: the highest of the last six windows.",
         "percentunit", {
             "{{model_name}} {{role}}": _pools("kv_router_pool_saturation"),
             "peak {{model_name}} {{role}}": _pools("kv_router_pool_peak_saturation"),
         }),
        ("Workers needed", "Up to capacity_target_saturation. None: not known, GET /capacity has "
         "the reasons.", "short", {
             "needed {{model_name}} {{role}}": _pools("kv_router_pool_workers_needed"),
             "{{state}} {{model_name}} {{role}}": _pools(
                 "kv_router_pool_workers", "model_name, role, state"),
         }),
        ("Booked work, and the wait of a new request", "Wait: on the rank where it is shortest.",
         "s", {
             "booked {{model_name}} {{role}}": _pools("kv_router_pool_booked_seconds"),
             "wait {{model_name}} {{role}}": _pools("kv_router_pool_wait_seconds"),
         }),
    ],
    "Index and events": [
        ("Messages of the event log a second", "gap, conflict and the like heal by checkpoints.",
         "short", {"{{outcome}}": _rate("kv_router_log_messages_total", "outcome")}),
        ("Doubts", "Each costs a checkpoint of one rank; none is lost.", "short", {
            "digests that differed": _rate("kv_router_index_differences_total"),
            "checkpoints asked: {{reason}}": _rate("kv_router_checkpoints_requested_total",
                                                   "reason"),
            "streams opened again": _rate("kv_router_stream_reopens_total"),
            "answers that differed": f"sum(kv_router_index_differing_answers{{{ROUTERS}}})",
        }),
        ("Room in the index", "Blocks of the limit; what does not fit degrades its rank.",
         "percentunit", {"{{instance}} {{model_name}}":
                         f"kv_router_index_blocks{{{ROUTERS}}} / kv_router_index_max_blocks"}),
    ],
    "Routers": [
        ("Ready, and connected", "", "short", {
            "ready": f"sum(kv_router_ready{{{ROUTERS}}})",
            "on the bus": f"sum(kv_router_bus_connected{{{ROUTERS}}})",
            "up": f"sum(kv_router_up{{{ROUTERS}}})",
        }),
        ("Other routers", "In doubt: something of them is missing here, until their snapshot.",
         "short", {
             "{{instance}} knows": f"kv_router_replica_known{{{ROUTERS}}}",
             "{{instance}} in doubt": f"kv_router_replica_in_doubt{{{ROUTERS}}}",
         }),
        ("Not sent", "", "short", {
            "effects dropped": _rate("kv_router_outbox_overflows_total"),
            "effects failed: {{effect}}": _rate("kv_router_outbox_failures_total", "effect"),
            "bus lost": _rate("kv_router_bus_losses_total"),
        }),
    ],
    "Agents": [
        ("Changes that wait for the bus", "Above a second the index is behind.", "s",
         {"{{pod}} {{dp_rank}}": "max by (pod, dp_rank) (kv_agent_publish_waiting_seconds)"}),
        ("Not published a second", "", "short", {
            "failed {{pod}} {{dp_rank}}": _agents("kv_agent_publish_failures_total"),
            "stream full {{pod}} {{dp_rank}}": _agents("kv_agent_publish_refusals_total"),
            "loads missed {{pod}} {{dp_rank}}": _agents("kv_agent_load_reports_missed_total"),
        }),
        ("Engines' events", "Lost: gaps that no replay filled. Not followed: whatever condition "
         "but following.", "short", {
             "lost {{pod}} {{dp_rank}}": _agents("kv_engine_lost_total"),
             "replay failures {{pod}} {{dp_rank}}": _agents("kv_engine_replay_failures_total"),
             "missing for s, {{pod}} {{dp_rank}}":
                 "max by (pod, dp_rank) (kv_engine_waiting_seconds)",
         }),
        ("Blocks by tier", "", "short", {
            "{{level}} kept": "sum by (level) (kv_agent_tier_inactive_blocks)",
            "{{level}} in use": "sum by (level) (kv_agent_tier_active_blocks)",
            "{{level}} room": "sum by (level) (kv_agent_tier_blocks)",
        }),
        ("Bytes through tiers a second", "", "Bps", {
            "{{level}} stored": _agents("kv_agent_tier_stored_bytes_total", "level"),
            "{{level}} loaded": _agents("kv_agent_tier_loaded_bytes_total", "level"),
        }),
        ("Blocks that tiers lost", "Corrupt: refused by their checksum, and computed again.",
         "short", {
             "{{level}} corrupt": _agents("kv_agent_tier_corrupt_blocks_total", "level"),
             "{{level}} not stored": _agents("kv_agent_tier_store_failures_total", "level"),
             "{{level}} not loaded": _agents("kv_agent_tier_load_failures_total", "level"),
             "{{level}} dropped": _agents("kv_agent_tier_dropped_blocks_total", "level"),
             "{{level}} broken": "max by (level) (kv_agent_tier_broken)",
         }),
    ],
}  # fmt: skip


def dashboard():
    """The whole, as Grafana imports it."""
    return {
        "title": "kv-router",
        "uid": "kv-router",
        "tags": ["kv-router"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source(), _routers()]},
        "panels": list(_panels()),
    }


def _source():
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _routers():
    query = "label_values(kv_router_up, instance)"
    return {
        "name": "router",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "router"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panels():
    y, number = 0, 0
    for title, panels in ROWS.items():
        number += 1
        place = {"x": 0, "y": y, "w": COLUMNS * WIDTH, "h": 1}
        yield {"id": number, "type": "row", "title": title, "gridPos": place, "panels": []}
        y += 1
        for i, panel in enumerate(panels):
            number += 1
            row, column = divmod(i, COLUMNS)
            place = {"x": column * WIDTH, "y": y + row * HEIGHT, "w": WIDTH, "h": HEIGHT}
            yield {"id": number, "gridPos": place, **_panel(*panel)}
        y += -(-len(panels) // COLUMNS) * HEIGHT


def _panel(title, description, unit, queries):
    return {
        "type": "timeseries",
        "title": title,
        "description": description,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for i, (legend, expr) in enumerate(queries.items())
        ],
    }


def text():
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
    sys.stdout.write(f"{FILE}\n")
