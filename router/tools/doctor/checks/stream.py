"""Checks of the live messages: arrival, frames, topic and order."""

from collections.abc import Iterator

from router.tools.doctor.findings import Finding, events_flag, ok, unknown, warning, wrong
from router.tools.doctor.messages import Sequences
from router.tools.doctor.observed_engine import ObservedEngine


def stream_findings(seen: ObservedEngine) -> Iterator[Finding]:
    """Yield the findings, in the order in which a message is read."""
    yield _liveness(seen)
    if seen.live.losses:
        yield _losses(seen)
    yield from _frames(seen)
    yield from _topic(seen)
    if seen.live.sequences.count:
        yield order_finding("sequence", "while watching", seen.live.sequences)


def _liveness(seen: ObservedEngine) -> Finding:
    live, config = seen.live, seen.config
    heard = f"{live.sequences.count} batches in {live.watched_s:.0f} s"
    if live.frame_counts:
        return ok("live events", heard)
    if not live.is_connected:
        why = "without a subscription no event arrives"
        fix = events_flag(seen.engine, config.zmq, config.replay)
        return wrong("live events", "a subscription gets no connection", why, fix)
    if _is_silent_although_probed(seen):
        return wrong(
            "live events",
            f"{heard}, although requests were served",
            "the router would consider every cache empty",
            events_flag(seen.engine, config.zmq, config.replay)
            + "; check that this is the port of the rank that serves --url",
        )
    return unknown(
        "live events",
        f"{heard}; an engine only publishes in a scheduler step",
        "send it a request while this runs, or let --url … --probe do so",
    )


def _is_silent_although_probed(seen: ObservedEngine) -> bool:
    requests = seen.probe.requests.values() if seen.probe else ()
    return any(request.problem is None for request in requests)


def _losses(seen: ObservedEngine) -> Finding:
    return warning(
        "connection",
        f"lost {seen.live.losses} times while watching",
        "each time the router has to request a replay, or is degraded",
        "check whether the engine restarts, and the network to it",
    )


def _frames(seen: ObservedEngine) -> Iterator[Finding]:
    counts, garbage = seen.live.frame_counts, seen.live.garbage
    odd = sorted(count for count in counts if count != 3)
    if odd or garbage:
        shape = f"messages of {odd[0]} frames" if odd else "a sequence of other than 8 bytes"
        yield wrong(
            "frames",
            f"{shape}, not [topic][sequence, 8 bytes][payload]",
            "such messages are ignored",
            "give the socket of the engine's own event publisher",
        )
    elif counts:
        yield ok("frames", "three: topic, sequence, payload")


def _topic(seen: ObservedEngine) -> Iterator[Finding]:
    asked, replayed = seen.config.topic, seen.replay.topics if seen.replay else {}
    topics = sorted((seen.live.topics | replayed).keys())
    shown = ", ".join(repr(topic) for topic in topics[:4])
    if not topics:
        if asked:
            yield unknown("topic", f"no message to compare {asked!r} with")
    elif all(topic.startswith(asked) for topic in topics):
        yield ok("topic", f"{shown}; the subscription ({asked!r}) matches")
    elif any(topic.startswith(asked) for topic in topics):
        text = f"of {shown} only those that begin with {asked!r} would be received"
        why = "if the others are this rank's too, their events are missing"
        yield warning("topic", text, why, "one rank per port, or a topic that all begin with")
    else:
        them = "it" if len(topics) == 1 else "all of them"
        yield wrong(
            "topic",
            f"published under {shown}; {asked!r} is no prefix of {them}",
            "ZMQ silently drops messages that no prefix matches",
            f"register with topic {topics[0]!r}, or with none, which matches everything",
        )


def order_finding(check: str, when: str, sequences: Sequences) -> Finding:
    """Return whether sequence numbers are contiguous, as a finding."""
    span = f"{sequences.first} to {sequences.last}"
    if sequences.returns:
        text = f"numbers went back {when} ({span})"
        why = "numbers restart at 0 with the engine: it restarted, or two engines publish here"
        return warning(check, text, why, "check whether the engine restarts; one engine per port")
    if sequences.first_gap is not None:
        before, after = sequences.first_gap
        text = (
            f"{sequences.missing} batches missing {when}, the first after {before} (then {after})"
        )
        why = "their events are lost, unless a replay fills the gap"
        return warning(check, text, why, 'raise "hwm" and "max_queue_size" in kv-events-config')
    return ok(check, f"contiguous {when}: {span}")
