"""What an engine counted between two of its reports."""

from msgspec import structs

from router.protocol.loads import LoadCounters, LoadReport

MOST = 1e18
"""More than any engine counts of anything, and little enough to reckon with."""


def is_sane(counters: LoadCounters) -> bool:
    """Can this have been counted? What is on the wire may be anything."""
    return all(0 <= value <= MOST for value in structs.astuple(counters))


def counted_since(before: LoadReport | None, report: LoadReport) -> LoadCounters:
    """What was counted since then; everything since its start where the engine began anew.

    An engine that restarts behind a living agent shows by its counters, which are lower than they
    were. What merely wavers (some engines' `requests_received`) is not below 0.
    """
    if before is None or is_new_life(before, report):
        return report.counters
    now, then = structs.asdict(report.counters), structs.asdict(before.counters)
    return LoadCounters(**{name: max(now[name] - then[name], 0) for name in now})


def is_new_life(before: LoadReport, report: LoadReport) -> bool:
    """Did the engine, or its agent, start again in between?"""
    now, then = report.counters, before.counters
    return (
        report.agent_incarnation != before.agent_incarnation
        or now.steps < then.steps
        or now.prefill_tokens < then.prefill_tokens
        or now.busy_s < then.busy_s
    )


def measured_busy_s(
    before: LoadReport | None, report: LoadReport, counted: LoadCounters, elapsed_s: float
) -> float | None:
    """For how long the engine was busy with what was counted; None: nobody knows.

    Of engines that do not measure it: all of the time, where they had work at both ends of it.
    """
    if report.counters.busy_s > 0:
        return counted.busy_s
    if before is None or is_new_life(before, report):
        return None
    return elapsed_s if _is_at_work(before) and _is_at_work(report) else None


def _is_at_work(report: LoadReport) -> bool:
    return report.gauges.running_requests + report.gauges.waiting_requests > 0
