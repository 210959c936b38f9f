"""`kv-router top`: the load of all workers, again and again, the worst first."""

import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from datetime import datetime

import msgspec

from router.protocol.replies import ScopeLoads
from router.protocol.workers import RankView, WorkerView
from router.runtime.process.command_line import Parser, number_within
from router.runtime.process.tables import table
from router.tools.inspect.router_client import InspectClient

_CLEAR = "\x1b[H\x1b[2J"
_HEADS = (
    "worker", "dp", "name", "model", "lifecycle", "running", "waiting", "booked", "to prefill",
    "cache", "trust",
)  # fmt: skip
_ROWS = 100
"""Limit of the ranks that are shown where the height of the terminal is unknown."""


def add_top(parser: Parser) -> None:
    """Add the options of `top`."""
    text = "time between updates (default: 2)"
    parser.add_argument(
        "--interval-s",
        type=number_within(0.05, 3600, "seconds"),
        default=2.0,
        metavar="SECONDS",
        help=text,
    )
    once = "print once, and exit; so it does where the output is no terminal"
    parser.add_argument("--once", action="store_true", help=once)


def watch(client: InspectClient, asked: Namespace) -> int:
    """Print the table until Ctrl-C is pressed. Raises ServerError."""
    is_screen = sys.stdout.isatty() and not (asked.once or asked.json)
    while True:
        workers, loads = client.workers(), client.loads()
        if asked.json:
            shown = msgspec.json.encode({"workers": workers, "loads": loads}).decode()
        else:
            shown = load_table(client.url, workers, loads, _height(is_screen=is_screen))
        sys.stdout.write(f"{_CLEAR if is_screen else ''}{shown}\n")
        sys.stdout.flush()
        if not is_screen:
            return 0
        try:
            time.sleep(max(0.1, asked.interval_s))
        except KeyboardInterrupt:
            return 0


def load_table(
    url: str, workers: Sequence[WorkerView], loads: Sequence[ScopeLoads], rows: int
) -> str:
    """Return totals, and the ranks with the worst first: at most `rows` of them."""
    ranks = [(worker, rank) for worker in workers for rank in worker.ranks or (None,)]
    ranks.sort(key=lambda pair: _badness(*pair), reverse=True)
    schedulable = sum(worker.lifecycle == "schedulable" for worker in workers)
    booked = sum(rank.active_requests for _, rank in ranks if rank is not None)
    waiting = sum(each.pending_count for each in loads)
    lines = [
        f"{url}  {datetime.now():%H:%M:%S}  {len(workers)} workers, {schedulable} schedulable; "
        f"{booked} requests booked, {waiting} waiting in the router",
        "",
        table(_HEADS, [_row(*pair) for pair in ranks[:rows]]) if ranks else "no workers",
    ]
    if len(ranks) > rows:
        lines.append(f"… and {len(ranks) - rows} more ranks; kv-router workers shows all")
    return "\n".join(lines)


def _badness(worker: WorkerView, rank: RankView | None) -> tuple[bool, bool, int]:
    """Return the sort key of a rank: first those that are not chosen, then those not exact."""
    if rank is None:
        return True, True, 0
    is_doubtful = rank.trust.state != "exact"
    return worker.lifecycle != "schedulable", is_doubtful, rank.active_requests


def _row(worker: WorkerView, rank: RankView | None) -> tuple[object, ...]:
    head = (worker.name, worker.model_name, worker.lifecycle)
    if rank is None:
        return (worker.worker_id, "-", *head, *"-----", "; ".join(worker.not_schedulable_reasons))
    load, most = rank.reported, worker.total_kv_blocks
    running, waiting = (
        ("-", "-") if load is None else (load.running_requests, load.waiting_requests)
    )
    cache = "-" if load is None or not most else f"{load.kv_used_blocks / most:.0%}"
    booked = (rank.active_requests, rank.active_prefill_tokens)
    return (
        worker.worker_id,
        rank.dp_rank,
        *head,
        running,
        waiting,
        *booked,
        cache,
        rank.trust.state,
    )


def _height(*, is_screen: bool) -> int:
    return max(1, shutil.get_terminal_size().lines - 6) if is_screen else _ROWS
