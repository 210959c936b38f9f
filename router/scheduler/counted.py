"""What an engine counted between two of its reports."""

from msgspec import structs

from router.protocol.loads import LoadCounters, LoadReport

MOST = 1e18
"""More than any engine counts of everything together, and little enough to reckon with."""


def is_sane(counters: LoadCounters) -> bool:
    """Can this have been counted? What is on the wire may be anything."""
    values = structs.astuple(counters)
    return bool(min(values) >= 0 and sum(values) <= MOST)  # a sum with NaN is not below


def counted_since(before: LoadReport | None, report: LoadReport) -> LoadCounters:
    """What was counted since then; everything since its start where the engine began anew.

    An engine that restarts behind a living agent shows by its counters, which are lower than they
    were. What merely wavers (some engines' `requests_received`) is not below 0.
    """
    if before is None or is_new_life(before, report):
        return report.counters
    now, then = structs.astuple(report.counters), structs.astuple(before.counters)
    return LoadCounters(*[max(each - was, 0) for each, was in zip(now, then, strict=True)])


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
