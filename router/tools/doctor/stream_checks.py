"""The messages: do they come, of three frames, under which topic, in order?"""

from collections.abc import Iterator

from router.tools.doctor.advice import events_flag
from router.tools.doctor.engine_seen import EngineSeen
from router.tools.doctor.findings import Finding, ok, unknown, warning, wrong
from router.tools.doctor.messages import Sequences


def stream_findings(seen: EngineSeen) -> Iterator[Finding]:
    """In the order in which a message is read."""
    yield _liveness(seen)
    if seen.live.losses:
        yield _losses(seen)
    yield from _frames(seen)
    yield from _topic(seen)
    if seen.live.sequences.count:
        yield order_finding("sequence", "while watching", seen.live.sequences)


def _liveness(seen: EngineSeen) -> Finding:
    live, config = seen.live, seen.config
    heard = f"{live.sequences.count} batches in {live.watched_s:.0f} s"
    if live.frame_counts:
        return ok("live events", heard)
    if not live.is_connected:
        why = "a subscription is refused, so nothing will ever arrive"
        fix = events_flag(seen.engine, config.zmq, config.replay)
        return wrong("live events", "a subscription gets no connection", why, fix)
    if _is_silent_although_probed(seen):
        return wrong(
            "live events",
            f"{heard}, although requests were served",
            "the router would take every cache to be empty",
            events_flag(seen.engine, config.zmq, config.replay)
            + "; is this the port of the rank that --url is served by?",
        )
    return unknown(
        "live events",
        f"{heard}; an engine only publishes in a scheduler step",
        "send it a request while this runs, or let --url … --probe do so",
    )


def _is_silent_although_probed(seen: EngineSeen) -> bool:
    requests = seen.probe.requests.values() if seen.probe else ()
    return any(request.problem is None for request in requests)


def _losses(seen: EngineSeen) -> Finding:
    return warning(
        "connection",
        f"lost {seen.live.losses} times while watching",
        "each time the router has to ask for a replay, or doubts what it holds",
        "see whether the engine restarts, and what lies between it and here",
    )


def _frames(seen: EngineSeen) -> Iterator[Finding]:
    counts, garbage = seen.live.frame_counts, seen.live.garbage
    odd = sorted(count for count in counts if count != 3)
    if odd or garbage:
        shape = f"messages of {odd[0]} frames" if odd else "a sequence that has not 8 bytes"
        yield wrong(
            "frames",
            f"{shape}, not [topic][sequence, 8 bytes][payload]",
            "such messages are passed over",
            "give the socket of the engine's own event publisher",
        )
    elif counts:
        yield ok("frames", "three: topic, sequence, payload")


def _topic(seen: EngineSeen) -> Iterator[Finding]:
    asked, replayed = seen.config.topic, seen.replay.topics if seen.replay else {}
    topics = sorted((seen.live.topics | replayed).keys())
    shown = ", ".join(repr(topic) for topic in topics[:4])
    if not topics:
        if asked:
            yield unknown("topic", f"no message to compare {asked!r} with")
    elif all(topic.startswith(asked) for topic in topics):
        yield ok("topic", f"{shown}; what is asked for ({asked!r}) matches")
    elif any(topic.startswith(asked) for topic in topics):
        text = f"of {shown} only those that begin with {asked!r} would be heard"
        why = "if the others are this rank's too, what they say is missing"
        yield warning("topic", text, why, "one rank a port, or a topic that all begin with")
    else:
        them = "it" if len(topics) == 1 else "all of them"
        yield wrong(
            "topic",
            f"published under {shown}; {asked!r} is no prefix of {them}",
            "ZMQ drops what no prefix matches, silently",
            f"register with topic {topics[0]!r}, or with none, which matches everything",
        )


def order_finding(check: str, when: str, sequences: Sequences) -> Finding:
    """Do numbers follow one another?"""
    span = f"{sequences.first} to {sequences.last}"
    if sequences.returns:
        text = f"numbers went back {when} ({span})"
        why = "numbers begin at 0 with every start: the engine restarted, or two publish here"
        return warning(check, text, why, "see whether the engine restarts; one engine a port")
    if sequences.first_gap is not None:
        before, after = sequences.first_gap
        text = (
            f"{sequences.missing} batches missing {when}, the first after {before} (then {after})"
        )
        why = "what they said is lost, unless a replay fills it"
        return warning(check, text, why, 'raise "hwm" and "max_queue_size" in kv-events-config')
    return ok(check, f"contiguous {when}: {span}")
