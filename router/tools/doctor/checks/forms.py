"""Checks of the batches: the wire version, the rank, and unreadable parts."""

from collections.abc import Iterator

from router.publisher.engine_metrics.dialects import EngineKind
from router.tools.doctor.findings import Finding, name_of, ok, unknown, warning, wrong
from router.tools.doctor.observed_engine import ObservedEngine

_ARRAYS_SINCE = {6: "0.9", 7: "0.10", 8: "0.12", 9: "0.16"}
"""Element counts of vLLM's stored event, each with the first version that has it."""

_LONGER_SINCE, _LAST_ARRAYS, _FIRST_MAPS = "0.17", "0.23", "0.24"


def form_findings(seen: ObservedEngine) -> Iterator[Finding]:
    """Yield the findings, in the order in which a batch is read."""
    yield from _version(seen)
    yield from _ranks(seen)
    yield from _unknowns(seen)
    yield from _unreadable(seen)


def _version(seen: ObservedEngine) -> Iterator[Finding]:
    forms, check = seen.forms, "wire version"
    if forms.maps and forms.arrays:
        why = "an engine sends only one of them, so two versions publish here"
        yield warning(check, "maps and arrays", why, "one engine per port")
    elif forms.maps:
        yield ok(check, f"maps: {_sender_of_maps(seen.engine)}")
    elif forms.longest_array:
        sender = _sender_of_arrays(seen.engine, forms.longest_array)
        yield ok(check, f"arrays of {forms.longest_array} elements: {sender}")
    elif seen.contents.batches > seen.contents.unreadable_batches:
        yield unknown(check, "no stored event yet", "send a request of several blocks")


def _sender_of_maps(engine: EngineKind | None) -> str:
    if engine == "sglang":
        return "SGLang (late 2026 on)"
    if engine == "trtllm":
        return "TensorRT-LLM, in vLLM's form"
    return f"vLLM {_FIRST_MAPS} or later, or TensorRT-LLM"


def _sender_of_arrays(engine: EngineKind | None, elements: int) -> str:
    if engine == "sglang":
        return "SGLang before its maps of late 2026"
    if elements < min(_ARRAYS_SINCE):
        return "no known engine"
    return f"vLLM {_ARRAYS_SINCE.get(elements, _LONGER_SINCE)} or later, at most {_LAST_ARRAYS}"


def _ranks(seen: ObservedEngine) -> Iterator[Finding]:
    ranks = sorted(seen.contents.dp_ranks)
    if len(ranks) > 1:
        yield wrong(
            "rank",
            f"ranks {', '.join(map(str, ranks))} publish on this socket",
            "one rank is read from one socket; batches of others are dropped",
            "one port per rank: engines add the rank to the port by themselves",
        )
    elif ranks:
        yield ok("rank", f"dp_rank {ranks[0]}")
    elif seen.contents.batches and seen.forms.batches_without_rank:
        yield ok("rank", "batches contain no rank: they count for the registered rank")


def _unknowns(seen: ObservedEngine) -> Iterator[Finding]:
    contents, names = seen.contents, seen.forms.unknown_fields
    if contents.unknown_types:
        types = ", ".join(sorted(contents.unknown_types))
        why = "they are ignored; if they concern cached blocks, those are missing"
        yield warning("event types", f"unknown: {types}", why, "look for a newer kv-router")
    if contents.unknown_field is not None:
        every = f" (all: {', '.join(sorted(names))})" if len(names) > 1 else ""
        why = "the rank is degraded: if it distinguishes blocks, unlike ones are taken for equal"
        text = f"{contents.unknown_field}{every}"
        yield warning("fields", text, why, "look for a newer kv-router")


def _unreadable(seen: ObservedEngine) -> Iterator[Finding]:
    contents, name = seen.contents, name_of(seen.engine)
    first = "; ".join(contents.malformed)
    if contents.unreadable_batches:
        yield wrong(
            "batches",
            f"{contents.unreadable_batches} of {contents.batches} are unreadable: {first}",
            "such a batch is lost, and the rank is degraded",
            f"give the event socket of {name}; no other publisher may use this port",
        )
    if contents.malformed_events:
        yield wrong(
            "events",
            f"{contents.malformed_events} cannot be read: {first}",
            "each is dropped, and the rank is degraded until its cache is cleared",
            f"report it, with the version of {name}",
        )
