"""The output of `kv-router up`."""

from collections.abc import Mapping, Sequence
from statistics import mean

from router.protocol.replies import Decision
from router.protocol.values import Rank
from router.tools.up.demo.demo import DemoRow, Summary
from router.tools.up.demo.demos import EndpointRow, Forced, HandedOver
from router.tools.up.fleet import LocalFleet
from router.tools.up.supervisor import Child

_ROW = "{:<28.28} {:>4}  {:>6}  {:>5} {:>9} {:>6} {:>9}  │ {:>5} {:>6} {:>9}"

_FORCED = "{:<28.28} {:>6}  {:>7}  {:>7} {:>9} {:>9}  │ {:>9} {:>9}"


_HANDED_OVER = "{:<28.28} {:>4}  {:>6}  {:>8} {:>9} {:>7}   │ {:>8} {:>6} {:>9}"

_SERVED = "{:<28.28} {:>4}  {:>6}  {:<22} {:>9} {:>6} {:>9}"


def fleet_table(fleet: LocalFleet, endpoints: Mapping[Rank, str]) -> str:
    """Return a table of the processes; workers are in the order of their names."""
    places = dict.fromkeys(endpoints.values())
    rows = [("what", "where", "pid", "log")]
    if fleet.bus is not None:
        rows.append(_row_of(fleet.bus, fleet.bus_url or ""))
    rows.append(_row_of(fleet.router, fleet.router_url))
    rows += [_row_of(*each) for each in zip(fleet.workers, places, strict=True)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def where_to_go_on(fleet: LocalFleet) -> str:
    """Return the URLs and commands to continue with."""
    model = fleet.model_name
    prompt = f'{{"model": "{model}", "prompt": "Once upon a time", "max_tokens": 16}}'
    return "\n".join(
        [
            f"\nserving at {fleet.router_url}",
            f"  dashboard         {fleet.router_url}/",
            f"  OpenAI endpoint   {fleet.openai_url}/v1 (model: {model})",
            f"  try it            curl {fleet.openai_url}/v1/completions "
            f"-H 'content-type: application/json' \\\n                      -d '{prompt}'",
            f"  list of workers   curl {fleet.router_url}/workers",
        ]
    )


def served_header() -> str:
    """Return the header of the rows of requests to the OpenAI endpoint."""
    names = ("conversation", "turn", "tokens", "worker", "predicted", "cached", "TTFT")
    return _SERVED.format(*names)


def served_row(row: EndpointRow, urls: Mapping[int, str]) -> str:
    """Return the row of a request to the OpenAI endpoint. `urls`: of workers, by id."""
    return _SERVED.format(
        row.turn.conversation,
        row.turn.number,
        row.prompt_tokens,
        urls.get(row.worker_id, row.worker_id),
        row.predicted_tokens,
        row.cached_tokens,
        _ms(row.ttft_s),
    )


def served_sum(rows: Sequence[EndpointRow]) -> str:
    """Return the totals of requests to the OpenAI endpoint."""
    cached_tokens = sum(row.cached_tokens for row in rows)
    prompt_tokens = sum(row.prompt_tokens for row in rows)
    right = sum(row.predicted_tokens == row.cached_tokens for row in rows)
    return (
        f"Of {prompt_tokens} tokens of {len(rows)} prompts {cached_tokens} were cached\n"
        f"{right} of {len(rows)} predictions equal the engine's own count"
    )


def header() -> str:
    """Return the header of the rows. A rank is shown as worker/dp_rank."""
    groups = " " * 42 + "placed by the router" + " " * 19 + "│ round-robin"
    names = ("conversation", "turn", "tokens", "rank", "predicted", "cached", "TTFT",
             "rank", "cached", "TTFT")  # fmt: skip
    return f"{groups}\n{_ROW.format(*names)}"


def row(outcome: DemoRow, baseline: Mapping[tuple[str, int], DemoRow]) -> str:
    """Return the row of a request, next to the same one placed round-robin."""
    other = baseline[outcome.turn.conversation, outcome.turn.number]
    return _ROW.format(
        outcome.turn.conversation,
        outcome.turn.number,
        outcome.prompt_tokens,
        _place(outcome.rank),
        outcome.predicted_tokens or 0,
        outcome.cached_tokens,
        _ms(outcome.ttft_s),
        _place(other.rank),
        other.cached_tokens,
        _ms(other.ttft_s),
    )


def comparison(routed: Summary, round_robin: Summary) -> str:
    """Return the totals of both runs."""
    lines = [f"{'':<26}{'by the router':>16}{'round-robin':>16}"]
    for name, ours, theirs in (
        ("cached prompt tokens", _share(routed), _share(round_robin)),
        ("TTFT, mean", _ms(routed.mean_ttft_s), _ms(round_robin.mean_ttft_s)),
        ("TTFT, median", _ms(routed.median_ttft_s), _ms(round_robin.median_ttft_s)),
        ("TTFT, 90th percentile", _ms(routed.p90_ttft_s), _ms(round_robin.p90_ttft_s)),
    ):
        lines.append(f"{name:<26}{ours:>16}{theirs:>16}")
    return "\n".join(lines)


def explanation(decision: Decision) -> str:
    """Return the candidates of a decision, each with its cached tokens and cost.

    The cost of a candidate is the sum of the parts shown.
    """
    candidates = sorted(decision.candidates or (), key=lambda candidate: candidate.cost)
    parts = list(candidates[0].parts)
    widths = [max(len(name), 8) for name in parts]
    header = "".join(f"  {name:>{width}}" for name, width in zip(parts, widths, strict=True))
    lines = [
        f"Why {_place(Rank(decision.worker_id, decision.dp_rank))} for a prompt of "
        f"{decision.isl_tokens} tokens? Policy {decision.policy}: the lowest cost, "
        "which is the sum of its parts.",
        f"{'rank':>6}  cached tokens  to prefill{header}  {'cost':>8}  trust",
    ]
    for each in candidates:
        cells = "".join(
            f"  {part:>{width}.3f}" for part, width in zip(each.parts.values(), widths, strict=True)
        )
        cached_tokens = each.predicted_cached_blocks * decision.block_size
        lines.append(
            f"{_place(Rank(each.worker_id, each.dp_rank)):>6}  {cached_tokens:>13}  "
            f"{each.potential_prefill_tokens:>10}{cells}  {each.cost:>8.3f}  {each.trust.state}"
        )
    return "\n".join(lines)


def agreement(outcomes: Sequence[DemoRow]) -> str:
    """Return the number of predictions that equal the engine's count."""
    wrong = sum(outcome.predicted_tokens != outcome.cached_tokens for outcome in outcomes)
    text = f"{len(outcomes) - wrong} of {len(outcomes)} predictions equal the engine's own count"
    return text + "; the cache changed under the others, between decision and admission" * bool(
        wrong
    )


def forced_header() -> str:
    """Return the header of the rows of prompts that were forced elsewhere."""
    groups = " " * 53 + "alone" + " " * 12 + "│ with its blocks"
    names = ("conversation", "tokens", "held by", "sent to", "cached", "TTFT", "cached", "TTFT")
    return f"{groups}\n{_FORCED.format(*names)}"


def forced_row(forced: Forced) -> str:
    """Return the row of a prompt that was forced elsewhere."""
    source = forced.source
    return _FORCED.format(
        forced.turn.conversation,
        len(forced.turn.token_ids),
        _place(Rank(source.worker_id, source.dp_rank)),
        _place(forced.rank),
        forced.alone.cached_tokens,
        _ms(forced.alone.ttft_s),
        forced.shared.cached_tokens,
        _ms(forced.shared.ttft_s),
    )


def forced_sum(forced: Sequence[Forced]) -> str:
    """Return the totals of the prompts that were forced elsewhere."""
    tokens = sum(len(each.turn.token_ids) for each in forced)
    alone = sum(each.alone.cached_tokens for each in forced)
    shared = sum(each.shared.cached_tokens for each in forced)
    ttfts = [
        mean(ttft_s)
        for ttft_s in zip(
            *((each.alone.ttft_s, each.shared.ttft_s) for each in forced), strict=True
        )
    ]
    return (
        f"Of {tokens} tokens forced elsewhere {alone} were cached, and {shared} with the blocks of "
        f"the worker that had computed them; TTFT, mean: {_ms(ttfts[0])}, {_ms(ttfts[1])}"
    )


def handed_over_header() -> str:
    """Return the header of the rows of prompts that were handed over."""
    groups = " " * 42 + "computed by" + " " * 18 + "│ decoded by"
    names = ("conversation", "turn", "tokens", "worker", "predicted", "cached", "worker", "given",
             "TTFT")  # fmt: skip
    return f"{groups}\n{_HANDED_OVER.format(*names)}"


def handed_over_row(done: HandedOver) -> str:
    """Return the row of a prompt that was handed over."""
    return _HANDED_OVER.format(
        done.turn.conversation,
        done.turn.number,
        len(done.turn.token_ids),
        done.prefill_worker_id,
        done.predicted_tokens,
        done.cached_tokens,
        done.worker_id,
        done.given_tokens,
        _ms(done.ttft_s),
    )


def handed_over_sum(done: Sequence[HandedOver]) -> str:
    """Return the totals of the prompts that were handed over."""
    tokens = sum(len(each.turn.token_ids) for each in done)
    given = sum(each.given_tokens for each in done)
    right = sum(each.predicted_tokens == each.cached_tokens for each in done)
    return (
        f"Of {tokens} tokens of {len(done)} prompts {given} were handed over or already there, "
        f"{tokens - given} computed by the decode worker\n"
        f"{right} of {len(done)} predictions equal the engine's own count"
    )


def _row_of(child: Child, where: str) -> tuple[str, str, str, str]:
    return child.name, where, str(child.pid), str(child.log_path)


def _place(rank: Rank) -> str:
    return f"{rank.worker_id}/{rank.dp_rank}"


def _share(summary: Summary) -> str:
    share = summary.cached_tokens / summary.prompt_tokens
    return f"{summary.cached_tokens} ({share:.0%})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
