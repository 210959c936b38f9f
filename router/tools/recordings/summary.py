"""`kv-router inspect recording`: what a recording contains, without replaying it."""

from collections import Counter
from collections.abc import Iterator, Sequence

from msgspec import Struct

from router.core.commands import Decision, Upsert
from router.protocol.values import Scope
from router.recording.entries import Entry
from router.recording.format import End, Hole, RecordingError
from router.runtime.process.tables import table
from router.tools.recordings.parts import OpenRecording


class GapView(Struct, frozen=True):
    """A gap: its line, its time, the number of missing entries, and the cause."""

    line: int
    at_s: float
    missing: int
    cause: str


class RecordingSummary(Struct, frozen=True):
    """The contents of a recording.

    `kinds`: its entries by kind. `refused`: its decisions without a rank, by error code. `gaps`:
    where entries are missing, in order. `ended`: the reason of its end, None without one.
    `problem`: why it is unreadable from some line on.
    """

    recorded_at: str
    product_version: str
    parts: Sequence[str]
    size_bytes: int
    seconds: float
    entries: int
    decisions: int
    kinds: dict[str, int]
    refused: dict[str, int]
    workers: int
    models: Sequence[str]
    gaps: Sequence[GapView]
    ended: str | None
    problem: str | None


def summary_of(recording: OpenRecording) -> RecordingSummary:
    """Return what a recording contains, up to its end or a damaged line. O(bytes)."""
    kinds, refused = Counter[str](), Counter[str]()
    workers: set[int] = set()
    scopes: set[Scope] = set()
    gaps: list[GapView] = []
    decisions, at_s, ended, problem = 0, 0.0, None, None
    try:
        for number, line in recording.lines():
            entry, at_s = line.entry, line.at_s
            if isinstance(entry, Hole):
                gaps.append(GapView(number, at_s, entry.missing, entry.cause))
            elif isinstance(entry, End):
                ended = entry.reason
            elif isinstance(entry.command, Upsert):
                workers.add(entry.command.announcement.worker_id)
                scopes.add(entry.command.announcement.scope)
            if isinstance(entry, Entry):
                kinds[str(entry.command.__struct_config__.tag)] += 1
                decisions += isinstance(entry.command, Decision)
                if entry.outcome.refused is not None:
                    refused[entry.outcome.refused] += 1
    except RecordingError as error:
        problem = str(error)
    return RecordingSummary(
        recorded_at=recording.header.recorded_at,
        product_version=recording.header.product_version,
        parts=[str(path) for path in recording.paths],
        size_bytes=recording.size_bytes,
        seconds=at_s,
        entries=kinds.total(),
        decisions=decisions,
        kinds=dict(kinds.most_common()),
        refused=dict(refused.most_common()),
        workers=len(workers),
        models=sorted({scope.model_name for scope in scopes}),
        gaps=gaps,
        ended=ended,
        problem=problem,
    )


def summary_report(summary: RecordingSummary) -> str:
    """Return a summary as text."""
    return "\n".join(_lines(summary))


def _lines(summary: RecordingSummary) -> Iterator[str]:
    yield (
        f"recorded {summary.recorded_at} by kv-router {summary.product_version}: "
        f"{summary.seconds:,.1f} s, {summary.size_bytes:,} bytes in {len(summary.parts)} file(s)"
    )
    yield f"{summary.workers} workers of {', '.join(summary.models) or 'no model'}"
    yield f"{summary.entries:,} commands, of which {summary.decisions:,} decisions"
    yield from _ends(summary)
    if summary.kinds:
        rows = [(kind, f"{count:,}") for kind, count in summary.kinds.items()]
        yield "\n" + table(("command", "times"), rows)
    if summary.refused:
        yield "\n" + table(("refused with", "times"), list(summary.refused.items()))


def _ends(summary: RecordingSummary) -> Iterator[str]:
    for gap in summary.gaps:
        missing = f"{gap.missing:,} entries are missing" if gap.missing else "the state is missing"
        yield f"line {gap.line}, +{gap.at_s:.1f} s: {missing} ({gap.cause})"
    if summary.gaps:
        yield "decisions behind a gap are replayed without comparison; simulate takes all traffic"
    if summary.problem is not None:
        yield f"unreadable from there: {summary.problem}"
    elif summary.ended is None:
        yield "it has no end: the router still runs, or its last moments are missing"
    else:
        yield f"it was ended: {summary.ended}"
