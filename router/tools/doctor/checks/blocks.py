"""Checks of the blocks: their size, hashes, kinds and tiers, and what a router would hold."""

from collections.abc import Iterator

from router.protocol.dumps import TIER_NAMES
from router.protocol.values import Doubt, doubt_text
from router.publisher.hybrid.groups import FULL_ATTENTION
from router.publisher.normalizer.mediums import tier_of
from router.runtime.process.tables import TIER_WORDS
from router.tools.doctor.event_totals import NO_MEDIUM
from router.tools.doctor.findings import (
    Finding,
    block_size_flag,
    name_of,
    ok,
    unknown,
    warning,
    wrong,
)
from router.tools.doctor.observed_engine import ObservedEngine
from router.tools.doctor.trial import ObservedTrial

_NOWHERE = "unknown"
_FOUND_APART = Doubt.HYBRID | Doubt.COPIES | Doubt.UNKNOWN_FIELDS
"""Doubts with a finding of their own."""

_ENV = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"


def block_findings(seen: ObservedEngine) -> Iterator[Finding]:
    """Yield the findings on blocks; without any block, only that."""
    if not seen.contents.stored:
        text = "no stored block was received"
        yield unknown("blocks", text, "send a request of several blocks, or use --probe")
        return
    yield from _size(seen)
    yield from _hashes(seen)
    yield from _groups(seen)
    yield from _mediums(seen)
    yield from _keys(seen)
    yield from _odd_blocks(seen)
    if seen.trial is not None:
        yield from _copies(seen, seen.trial)
        if seen.trial.block_size in seen.contents.block_sizes:
            yield _held(seen.trial)


def _size(seen: ObservedEngine) -> Iterator[Finding]:
    sizes, asked = seen.contents.block_sizes, seen.config.block_size
    block_size_seen = seen.block_size
    if block_size_seen is None:
        yield unknown("block size", "no block contained its tokens", "send a request")
        return
    shown = ", ".join(f"{size} tokens ({sizes[size]} blocks)" for size in sorted(sizes))
    if asked and asked not in sizes:
        yield wrong(
            "block size",
            f"events contain {shown}; {asked} was given",
            "blocks of another size are never credited: every prompt would look cold",
            f"register block_size {block_size_seen}, or start {name_of(seen.engine)} with "
            f"{block_size_flag(seen.engine, asked)}",
        )
    elif len(sizes) > 1:
        why = "smaller blocks are partial and ignored, larger ones are refused"
        fix = f"register block_size {asked or block_size_seen}"
        yield warning("block size", f"several: {shown}", why, fix)
    else:
        yield ok("block size", f"{block_size_seen} tokens{', as given' if asked else ''}")


def _hashes(seen: ObservedEngine) -> Iterator[Finding]:
    kinds = seen.forms.hash_kinds
    words = {"unsigned": "64 bits, unsigned", "signed": "64 bits, signed", "32 bytes": "32 bytes"}
    strange = sorted(kinds.keys() - words.keys())
    if strange:
        fix = f"start vLLM with {_ENV}=1, which is its default"
        text, why = f"of {', '.join(strange)}", "events with such hashes are dropped as unreadable"
        yield wrong("hash type", text, why, fix)
    elif kinds["32 bytes"]:
        fix = f"{_ENV}=1, the default, makes them 64 bits, which more routers read"
        text = "32 bytes, which are read as well"
        yield ok("hash type", f"{text}; {fix}")
    elif kinds:
        signed = "signed" if kinds["signed"] else "unsigned"
        yield ok("hash type", words[signed])


def _groups(seen: ObservedEngine) -> Iterator[Finding]:
    groups = seen.contents.groups
    kinds = {kind for _, kind in groups if kind is not None}
    other = sorted(kinds - FULL_ATTENTION)
    layout = seen.trial.hybrid.layout if seen.trial and seen.trial.hybrid else None
    if other:
        text = f"a hybrid model: {', '.join(other)} in {len(groups)} groups"
        if layout is not None and not layout.problem:
            yield ok(
                "attention", f"{text}; prompts resume at every {layout.alignment_tokens} tokens"
            )
            return
        problem = "" if layout is None else f": {layout.problem}"
        why = f"where prompts can be resumed is not exact, and the rank is degraded{problem}"
        yield warning("attention", text, why, "see Hybrid models in docs/attach.md")
    elif kinds:
        yield ok("attention", ", ".join(sorted(kinds)))


def _mediums(seen: ObservedEngine) -> Iterator[Finding]:
    block_size_seen = sorted(seen.contents.mediums.items())
    shown = ", ".join(
        f"{medium} ({_tier(medium)}): {blocks} blocks" for medium, blocks in block_size_seen
    )
    if any(_tier(medium) == _NOWHERE for medium, _ in block_size_seen):
        why = "blocks in an unknown medium are not credited"
        yield warning("mediums", shown, why, "look for a newer kv-router")
    else:
        yield ok("mediums", shown)


def _tier(medium: str) -> str:
    tier = tier_of(None if medium == NO_MEDIUM else medium, None)
    return _NOWHERE if tier is None else TIER_WORDS[TIER_NAMES[tier]]


def _keys(seen: ObservedEngine) -> Iterator[Finding]:
    contents = seen.contents
    parts = [
        f"LoRA {', '.join(sorted(contents.lora_names))}" if contents.lora_names else "",
        f"{sum(contents.salts.values())} events with a salt" if contents.salts else "",
        f"{contents.mm_blocks} multimodal blocks" if contents.mm_blocks else "",
    ]
    block_size_seen = "; ".join(part for part in parts if part)
    if block_size_seen:
        yield ok(
            "keys", f"{block_size_seen}: callers must send the same with their tokens to match"
        )
    if contents.opaque_blocks:
        text = f"{contents.opaque_blocks} blocks have extra keys of an unknown kind"
        why = "such blocks match no prompt, so those prompts appear uncached"
        yield warning("extra keys", text, why, "look for a newer kv-router")
    if contents.eagle_events:
        text = "tokens come as pairs (EAGLE): register with is_eagle true"
        yield ok("eagle", text)


def _odd_blocks(seen: ObservedEngine) -> Iterator[Finding]:
    if seen.contents.placeholders:
        text = f"{seen.contents.placeholders} offloaded blocks came without tokens"
        why = "they count once their device copy was received; after a late start they do not"
        fix = 'kv_connector_extra_config {"self_describing_kv_events": true} makes vLLM send them'
        yield warning("placeholders", text, why, fix)
    partial = seen.trial.stats.counts.partial if seen.trial else 0
    if partial:
        yield ok("partial blocks", f"{partial}, smaller than a block: ignored")


def _copies(seen: ObservedEngine, trial: ObservedTrial) -> Iterator[Finding]:
    pool = seen.server.facts.total_kv_blocks if seen.server else None
    text = f"{trial.stats.device_copies} copies of {trial.held.counts[0]} blocks on the device"
    fix = 'register with report_mode "full" (a store then means "present", not "one more copy")'
    why = "kv_cache_report_mode full repeats held blocks; counted as copies they are never removed"
    if trial.doubts(Doubt.COPIES):
        yield wrong("copies", f"{text}, which has room for {pool}", why, fix)
    elif trial.extra_copies > trial.held.counts[0] and pool is None:
        yield warning("copies", f"{text}: repeated, or very many equal requests", why, fix)
    elif trial.extra_copies:
        yield ok("copies", f"{text}: equal requests that ran at once, counted as such")


def _held(trial: ObservedTrial) -> Finding:
    """Return the verdict of a router's own normaliser on all received events."""
    held = ", ".join(
        f"{count} on {word}"
        for word, count in zip(TIER_WORDS.values(), trial.held.counts, strict=True)
        if count
    )
    text = f"a router would hold {held or 'nothing'}"
    doubts = trial.held.doubts & ~_FOUND_APART
    if trial.complaints and trial.stats.counts.refused_events:
        fix = "one engine per port; else report it, with the engine's version"
        return wrong("would hold", f"{text}; {trial.complaints[0]}", doubt_text(doubts), fix)
    if doubts:
        why = "this engine would be degraded: a prefix may be missed, but none is invented"
        fix = "restart it, or clear its cache, once it is registered"
        return warning("would hold", f"{text}, with a doubt: {doubt_text(doubts)}", why, fix)
    return ok("would hold", f"{text}, without {'a further' if trial.held.doubts else 'a'} doubt")
