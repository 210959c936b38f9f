"""The replay: what mends a gap, and lets a router that starts late know everything."""

from collections.abc import Iterator

from router.tools.doctor.advice import events_flag
from router.tools.doctor.engine_seen import EngineSeen
from router.tools.doctor.findings import Finding, ok, unknown, warning, wrong
from router.tools.doctor.messages import ReplaySeen
from router.tools.doctor.stream_checks import order_finding

_NEEDED = "without a replay a gap, or a router that starts late, leaves the rank degraded"


def replay_findings(seen: EngineSeen) -> Iterator[Finding]:
    """Of the answers to one question for everything."""
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


def _no_answer(seen: EngineSeen, replay: ReplaySeen) -> Finding:
    shown = "no answer" if replay.failure is None else f"no answer ({replay.failure})"
    if replay.garbage:
        shown = "what answers is no batch"
    fix = "give the replay_endpoint of the engine's kv-events-config; only one engine a port"
    return wrong("replay", f"{shown} at {seen.config.replay}", _NEEDED, fix)


def _answers(seen: EngineSeen, replay: ReplaySeen) -> Iterator[Finding]:
    if replay.with_topic or replay.without_topic:
        shape = "topic, sequence, payload"
        if replay.without_topic:
            shape = "sequence, payload: without a topic, as in vLLM before its #45177"
        yield ok("replay", f"{replay.sequences.count} batches; each {shape}")
    else:
        yield ok("replay", "answers; there is nothing to tell yet")
    yield _end(replay)
    yield from _reach(seen, replay)
    yield from _sameness(seen, replay)


def _end(replay: ReplaySeen) -> Finding:
    if replay.has_ended:
        return ok("replay end", "says when it is over")
    return wrong(
        "replay end",
        f"stopped after {replay.sequences.count} batches without saying that it was over",
        "the router takes such a replay for failed, and asks again and again",
        "upgrade the engine; a REP socket, or a proxy for one answer a question, cannot replay",
    )


def _reach(seen: EngineSeen, replay: ReplaySeen) -> Iterator[Finding]:
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
            "what was cached before is unknown to a router that starts now: degraded",
            f"register engines before they serve; {flag}",
        )


def _sameness(seen: EngineSeen, replay: ReplaySeen) -> Iterator[Finding]:
    if replay.differing:
        yield wrong(
            "replay content",
            f"{replay.differing} batches are not what came live under the same numbers",
            "the router would take every replay for a new life, and forget what it holds",
            "give the replay endpoint of the same engine and rank",
        )
    elif replay.same:
        yield ok("replay content", f"{replay.same} batches are byte for byte what came live")
    elif seen.live.sequences.count:
        yield wrong(
            "replay content",
            f"none of the {seen.live.sequences.count} live batches is in it",
            "the router could never tell that both are of one life",
            "give the replay endpoint of the same engine and rank",
        )
    else:
        yield unknown("replay content", "no live batch to compare with", "see live events")
