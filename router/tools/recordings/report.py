"""The result of a replay, as text."""

from collections.abc import Iterator, Mapping

from router.core.commands import Placing
from router.recording.entries import Entry, RecordedResult
from router.recording.format import Header, RecordingError, Setting
from router.recording.replay import Compared, Replay
from router.runtime.process.tables import table
from router.scheduler.terms import Terms
from router.tools.recordings.tally import Tally, Totals, cached_tokens

EMPTY = "it has no decision to compare: no caller asked the recorded router"


def opening(path: str, header: Header, settings: Mapping[str, Setting], product: str) -> str:
    """Return the origin of a recording, and the changed settings."""
    lines = [f"{path}: recorded {header.recorded_at} by kv-router {header.product_version}"]
    if product != header.product_version:
        lines.append(f"replayed by kv-router {product}, which may decide differently")
    lines += [
        f"  {name}: {header.settings.get(name)}, now {value}" for name, value in settings.items()
    ]
    return "\n".join(lines)


def decision_line(compared: Compared) -> str:
    """Return a line on a decision, as it is made."""
    verdict = "equal" if compared.is_equal else f"recorded {_place(compared.recorded.outcome)}"
    return f"{_head(compared)}: {_place(compared.now.outcome)}, {verdict}"


def closing(
    replay: Replay,
    tally: Tally,
    problem: RecordingError | None,
    elapsed_s: float,
    *,
    is_at_end: bool,
) -> Iterator[str]:
    """Yield the extent of the replay, and the reason for its end."""
    yield f"{replay.lines:,} lines of {replay.at_s:.1f} s, replayed in {elapsed_s:.2f} s"
    if replay.hole_line is not None:
        yield (
            f"line {replay.hole_line}: {_gap(replay)}; {tally.unproven} decisions after it are not "
            "compared"
        )
    if replay.cause in ("midway", "rotated"):
        yield "its traffic can be simulated: kv-router simulate FILE"
    if problem is not None:
        last = f"the {replay.lines:,} lines before it were replayed"
        yield f"{problem}; {last}"
    elif replay.ended is not None:
        yield f"the recording was ended: {replay.ended}"
    elif is_at_end:
        yield "the recording has no end: the router still runs, or its last moments are missing"


def _gap(replay: Replay) -> str:
    """Return what is missing in a recording, and why."""
    if replay.cause == "midway":
        return "it began in a running router, whose state before is not in it"
    if replay.cause == "rotated":
        return f"{replay.missing} records are missing, their part was deleted for newer ones"
    return f"{replay.missing} records are missing, they came faster than they were written"


def equality(tally: Tally) -> Iterator[str]:
    """Yield the number of decisions that equal the recorded ones, and the first differences."""
    yield f"decisions: {tally.equal:,} of {tally.decisions:,} equal"
    for compared in tally.first:
        yield _difference(compared)


def as_value(replay: Replay, tally: Tally, problem: RecordingError | None) -> dict[str, object]:
    """Return the result for programs: counts, and sums over the choices of a rank."""
    return {
        "lines": replay.lines,
        "recorded_s": replay.at_s,
        "decisions": tally.decisions,
        "equal": tally.equal,
        "not_compared": tally.unproven,
        "choices": tally.choices,
        "moved": tally.moved,
        "recorded": tally.recorded,
        "now": tally.now,
        "problem": None if problem is None else str(problem),
    }


def scores(tally: Tally) -> Iterator[str]:
    """Yield the changes due to the other settings, as far as a recording contains them."""
    part = tally.moved / tally.choices if tally.choices else 0.0
    yield f"choices: {tally.moved:,} of {tally.choices:,} of another rank ({part:.1%})"
    yield table(["", "recorded", "now", "change"], list(_sums(tally.recorded, tally.now)))
    if tally.largest:
        yield "the largest differences:"
    for compared in tally.largest:
        yield _difference(compared)


def _sums(recorded: Totals, now: Totals) -> Iterator[tuple[str, str, str, str]]:
    names = {
        "cached_tokens": "tokens predicted to be cached",
        "prefill_tokens": "prefill tokens, the chosen rank",
        "decode_blocks": "decode blocks, the chosen rank",
    }
    for field, text in names.items():
        before, after = getattr(recorded, field), getattr(now, field)
        change = f"{(after - before) / before:+.1%}" if before else "-"
        yield text, f"{before:,}", f"{after:,}", change


def _difference(compared: Compared) -> str:
    before, after = compared.recorded.outcome, compared.now.outcome
    _, isl_tokens = _request_of(compared.recorded)
    lines = [
        f"  {_head(compared)}, {isl_tokens:,} tokens",
        f"    recorded    {_in_words(before)}",
        f"    now         {_in_words(after)}",
    ]
    terms = _now_there(compared)
    if terms is not None and before.rank != after.rank:
        lines.append(f"    instead of  {_weighed(*terms)}")
    elif before.rank == after.rank and before.terms == after.terms:
        lines.append("    the rank is the same; what the other candidates cost is not")
    return "\n".join(lines)


def _now_there(compared: Compared) -> tuple[Terms, float] | None:
    """Return the present terms and cost of the recorded rank; None if it is no candidate."""
    choice = compared.now.choice
    if choice is None:
        return None
    index = choice.table.find(compared.recorded.outcome.rank)
    return None if index is None else (choice.table.terms(index), float(choice.costs[index]))


def _head(compared: Compared) -> str:
    entry = compared.recorded
    kind = str(entry.command.__struct_config__.tag)
    request_id, _ = _request_of(entry)
    named = f"{kind} {request_id}" if request_id is not None else kind
    return f"line {compared.line}, +{compared.at_s:.3f} s, {named}"


def _request_of(entry: Entry) -> tuple[str | None, int]:
    """Return the request id and the prompt length of a decision."""
    if not isinstance(entry.command, Placing):
        return entry.request_id, entry.isl_tokens
    request = entry.command.request
    return request.request_id, request.isl_tokens or len(request.token_ids or ())


def _place(outcome: RecordedResult) -> str:
    return f"refused ({outcome.refused})" if outcome.rank is None else f"rank {outcome.rank}"


def _in_words(outcome: RecordedResult) -> str:
    if outcome.terms is None or outcome.cost is None:
        booked = f", {outcome.overlap_blocks} blocks cached" if outcome.rank is not None else ""
        return _place(outcome) + booked
    return _weighed(outcome.terms, outcome.cost)


def _weighed(terms: Terms, cost: float) -> str:
    return (
        f"rank {terms.rank}: cost {cost:,.2f}, {cached_tokens(terms):,} tokens cached, with it "
        f"{terms.potential_prefill_tokens:,} tokens to prefill and "
        f"{terms.potential_decode_blocks:,} blocks to decode"
    )
