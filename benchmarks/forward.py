"""Forwarding: what it adds, beside two proxies of PyPI, before the same trivial engine.

    python benchmarks/forward.py [--quick] [--json] [--only latency,text,rate,…] [--write]

All are real processes on one core, asked in turn by one generator on another, where the engine is,
too. Ours is `kv-router serve --workers … --openai-port` as its image has it, which reads and books
every request; the peers take turns among engines, and decide nothing. Where other work runs,
`chrt -f 1 python benchmarks/forward.py` keeps it off. `--write` keeps the rows, in
`results/forward.json`.
"""

import sys
from functools import partial

from command_line import section_parser
from conformance.environments import base_python
from forward_rows import latency, rate, separate, text
from forward_servers import Scale
from forward_streams import idle, stream
from report import Benchmark, Section, report, version_of

SECTIONS = {
    "latency": "added to a request of 1,000 token ids, p50, one at a time",
    "text": "added to a request of 1,000 tokens of new text, p50, one at a time",
    "rate": "requests a second of a core, 64 at once, 1,000 token ids",
    "separate": "added by an endpoint in a process of its own, p50, one at a time",
    "stream": "64 streams, 50 chunks a second each; beside it what is allowed",
    "idle": "resident memory; beside it what is allowed",
}
MEASURE = {
    "latency": latency,
    "text": text,
    "rate": rate,
    "separate": separate,
    "stream": stream,
    "idle": idle,
}
QUICK = ("latency", "text", "rate")
"""Those that end within 45 s together."""


def main() -> int:
    parser = section_parser(__doc__, SECTIONS)
    parser.set_defaults(only=None)
    arguments = parser.parse_args()
    scale = Scale(arguments.quick)
    facts = {"interpreter of ours": version_of(base_python())}
    chosen = {
        name: Section(SECTIONS[name], partial(MEASURE[name], scale))
        for name in arguments.only or (QUICK if arguments.quick else SECTIONS)
    }
    return report(chosen, Benchmark("forward", "beside it", str(scale), facts), arguments)


if __name__ == "__main__":
    sys.exit(main())
