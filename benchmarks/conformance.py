"""The conformance kit (`router/tools/conformance`) with this router and its peers side by side.

python benchmarks/conformance.py [--quick] [--json] [--only …] [--system …] [--write]
"""

import argparse
import json
import os
import sys
import time

from conformance import SYSTEMS
from report import RESULTS, Benchmark

from router.tools.conformance.command import FULL, QUICK, chosen, measure
from router.tools.conformance.table import Table, page

MEASURED = Benchmark("conformance", "", "every scenario once, all systems at the same time")
FAIRNESS = (
    "Dynamo's selection service is given its engines over HTTP. After a kill −9 it is given them "
    "again, as an orchestrator does. It has no `/metrics`; its log is read.",
    "vllm-router has no API for overlaps: its own log says what it credits to the worker it chose, "
    "and all its tier credits are set to 1. It is asked with both `model` and `lora_name`. Its "
    "metrics have no series for batches that it cannot read; its log is read. It is a router of "
    "vLLM engines: streams of SGLang are not scored for it.",
    "vllm-router and kv-router forget all of an engine after a gap that they cannot fill: they "
    "miss what it still has, and have no ghosts.",
    "kv-router is configured with the kind of each engine, and with `report_mode: full` where "
    "engines report blocks again; the peers have no such settings, and sets of blocks are right "
    "there by nature.",
    "Of hybrid models the truth is the number of tokens that a real engine reused. Peers count "
    "what full attention holds, their overlap; kv-router is asked for what can be "
    "resumed, and told the span of chunks, which no event contains.",
    "We wrote the scenarios. Nobody of the peers' projects has reviewed them.",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less patience; at most 45 s")
    parser.add_argument("--json", action="store_true", help="cells and totals as JSON")
    parser.add_argument("--only", default="", help="words of scenarios, groups or causes")
    parser.add_argument(
        "--system", default=",".join(SYSTEMS), help="which systems, comma-separated"
    )
    parser.add_argument("--write", action="store_true", help=f"into {RESULTS.name}/ as well")
    arguments = parser.parse_args()
    started_s, facts = time.monotonic(), MEASURED.facts()
    kinds = {name: SYSTEMS[name] for name in arguments.system.split(",")}
    table, unavailable = measure(chosen(arguments.only), kinds, QUICK if arguments.quick else FULL)
    facts["load after"] = round(os.getloadavg()[0], 2)
    head = "; ".join(f"{name} {value}" for name, value in facts.items())
    head += f"; {time.monotonic() - started_s:.0f} s"
    missing = [f"{kinds[name].title}: {reason}" for name, reason in unavailable.items()]
    text = page(table, head, missing, FAIRNESS)
    data = json.dumps(
        {"measured": facts, "unavailable": unavailable, "rows": beside(table)}
        | table.as_builtins(),
        indent=1,
    )
    if arguments.write:
        (RESULTS / "conformance.md").write_text(text)
        (RESULTS / "conformance.json").write_text(data + "\n")
    print(data if arguments.json else text)
    return int("ours" in table.titles and table.is_silently_wrong("ours"))


def beside(table: Table) -> list[dict[str, object]]:
    """Rows as every benchmark here prints them: causes that are right, ours and a peer's."""
    if "ours" not in table.titles:
        return []
    ours = table.by_cause("ours")
    return [
        {
            "name": f"right causes / {name}",
            "ours": ours.right,
            "peer": (right := table.by_cause(name).right),
            "unit": "causes",
            "ratio": ours.right / right if right else None,
            "goal": 1.0,
            "holds": ours.right >= right and not ours.wrong,
        }
        for name in table.titles
        if name != "ours"
    ]


if __name__ == "__main__":
    sys.exit(main())
