"""Checks of the replay, which fills gaps, and the history of a router that starts late."""

from collections.abc import Iterator

from router.tools.doctor.checks.stream import order_finding
from router.tools.doctor.findings import Finding, events_flag, ok, unknown, warning, wrong
from router.tools.doctor.messages import ObservedReplay
from router.tools.doctor.observed_engine import ObservedEngine

_NEEDED = "without a replay a gap, or a router that starts late, leaves the rank degraded"


def replay_findings(seen: ObservedEngine) -> Iterator[Finding]:
    """Yield the findings on the responses to one request for all batches."""
    config = seen.config
    if not config.replay:
        why = f"{_NEEDED}; and an idle engine counts as lagging after a second"
        fix = events_flag(seen.engine, config.zmq, config.replay) + ", and give --replay"
        yield warning("replay", "no endpoint given", why, fix)
    elif seen.replay is None:
        return
    elif not seen.replay.sequences.count and not seen.replay.has_ended:
        yield _no_answer(seen, seen.replay)
    else:
        yield from _answers(seen, seen.replay)


def _no_answer(seen: ObservedEngine, replay: ObservedReplay) -> Finding:
    shown = "no response" if replay.failure is None else f"no response ({replay.failure})"
    if replay.garbage:
        shown = "its responses are not batches"
    fix = "give the replay_endpoint of the engine's kv-events-config; only one engine per port"
    return wrong("replay", f"{shown} at {seen.config.replay}", _NEEDED, fix)


def _answers(seen: ObservedEngine, replay: ObservedReplay) -> Iterator[Finding]:
    if replay.with_topic or replay.without_topic:
        shape = "topic, sequence, payload"
        if replay.without_topic:
            shape = "sequence, payload: without a topic, as in vLLM before its #45177"
        yield ok("replay", f"{replay.sequences.count} batches; each {shape}")
    else:
        yield ok("replay", "responds; there are no batches yet")
    yield _end(replay)
    yield from _reach(seen, replay)
    yield from _sameness(seen, replay)


def _end(replay: ObservedReplay) -> Finding:
    if replay.has_ended:
        return ok("replay end", "sends an end marker")
    return wrong(
        "replay end",
        f"stopped after {replay.sequences.count} batches without an end marker",
        "the router considers such a replay failed, and requests it again and again",
        "upgrade the engine; a REP socket, or a proxy for single responses, cannot replay",
    )


def _reach(seen: ObservedEngine, replay: ObservedReplay) -> Iterator[Finding]:
    sequences = replay.sequences
    if not sequences.count:
        return
    if sequences.missing or sequences.returns:
        yield order_finding("replay order", "in the replay", sequences)
    if sequences.first == 0:
        yield ok("replay reach", f"back to batch 0: {sequences.last} is the newest")
    else:
        flag = events_flag(seen.engine, seen.config.zmq, seen.config.replay, buffer_steps=100_000)
        yield warning(
            "replay reach",
            f"back to batch {sequences.first} only, {sequences.last} is the newest",
            "earlier blocks are unknown to a router that starts now: degraded",
            f"register engines before they serve; {flag}",
        )


def _sameness(seen: ObservedEngine, replay: ObservedReplay) -> Iterator[Finding]:
    if replay.differing:
        yield wrong(
            "replay content",
            f"{replay.differing} batches differ from the live ones with the same numbers",
            "the router would treat every replay as a restart, and drop the rank's blocks",
            "give the replay endpoint of the same engine and rank",
        )
    elif replay.same:
        yield ok("replay content", f"{replay.same} batches equal the live ones, byte for byte")
    elif seen.live.sequences.count:
        yield wrong(
            "replay content",
            f"none of the {seen.live.sequences.count} live batches is in it",
            "the router could never confirm that both are of one run",
            "give the replay endpoint of the same engine and rank",
        )
    else:
        yield unknown("replay content", "no live batch to compare with", "see live events")
