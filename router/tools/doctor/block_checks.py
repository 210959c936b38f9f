"""The blocks: their size, names, kinds and places, and what a router would hold of them."""

from collections.abc import Iterator

from router.protocol.dumps import TIER_NAMES
from router.protocol.values import Doubt, doubt_text
from router.publisher.credit import FULL_ATTENTION, tier_of
from router.tools.doctor.advice import block_size_flag, name_of
from router.tools.doctor.contents import NO_MEDIUM
from router.tools.doctor.engine_seen import EngineSeen
from router.tools.doctor.findings import Finding, ok, unknown, warning, wrong
from router.tools.doctor.trial import TrialSeen
from router.tools.tiers import TIER_WORDS

_NOWHERE = "unknown"
_ENV = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"


def block_findings(seen: EngineSeen) -> Iterator[Finding]:
    """Nothing where no block was heard of, but that."""
    if not seen.contents.stored:
        text = "no stored block was heard of"
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


def _size(seen: EngineSeen) -> Iterator[Finding]:
    sizes, asked = seen.contents.block_sizes, seen.config.block_size
    told = seen.block_size
    if told is None:
        yield unknown("block size", "no block came with its tokens", "send a request")
        return
    shown = ", ".join(f"{size} tokens ({sizes[size]} blocks)" for size in sorted(sizes))
    if asked and asked not in sizes:
        yield wrong(
            "block size",
            f"events say {shown}; {asked} was given",
            "blocks of another size are never credited: every prompt would look cold",
            f"register block_size {told}, or start {name_of(seen.engine)} with "
            f"{block_size_flag(seen.engine, asked)}",
        )
    elif len(sizes) > 1:
        why = "smaller blocks are partial ones and passed over, larger ones are refused"
        fix = f"register block_size {asked or told}"
        yield warning("block size", f"several: {shown}", why, fix)
    else:
        yield ok("block size", f"{told} tokens{', as given' if asked else ''}")


def _hashes(seen: EngineSeen) -> Iterator[Finding]:
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


def _groups(seen: EngineSeen) -> Iterator[Finding]:
    groups = seen.contents.groups
    kinds = {kind for _, kind in groups if kind is not None}
    other = sorted(kinds - FULL_ATTENTION)
    if other:
        yield warning(
            "attention",
            f"a hybrid model: {', '.join(other)} in {len(groups)} groups",
            "only full attention is credited, so overlap is an upper bound and the rank degraded",
            "none is needed; answers say so",
        )
    elif kinds:
        yield ok("attention", ", ".join(sorted(kinds)))


def _mediums(seen: EngineSeen) -> Iterator[Finding]:
    told = sorted(seen.contents.mediums.items())
    shown = ", ".join(f"{medium} ({_tier(medium)}): {blocks} blocks" for medium, blocks in told)
    if any(_tier(medium) == _NOWHERE for medium, _ in told):
        why = "blocks in an unknown medium are not credited"
        yield warning("mediums", shown, why, "look for a newer kv-router")
    else:
        yield ok("mediums", shown)


def _tier(medium: str) -> str:
    tier = tier_of(None if medium == NO_MEDIUM else medium, None)
    return _NOWHERE if tier is None else TIER_WORDS[TIER_NAMES[tier]]


def _keys(seen: EngineSeen) -> Iterator[Finding]:
    contents = seen.contents
    parts = [
        f"LoRA {', '.join(sorted(contents.lora_names))}" if contents.lora_names else "",
        f"{sum(contents.salts.values())} events with a salt" if contents.salts else "",
        f"{contents.mm_blocks} multimodal blocks" if contents.mm_blocks else "",
    ]
    told = "; ".join(part for part in parts if part)
    if told:
        yield ok("keys", f"{told}: callers must send the same with their tokens to match")
    if contents.opaque_blocks:
        text = f"{contents.opaque_blocks} blocks have extra keys of an unknown kind"
        why = "such blocks match no prompt, so those prompts look cold"
        yield warning("extra keys", text, why, "look for a newer kv-router")
    if contents.eagle_events:
        text = "tokens come as pairs (EAGLE): register with is_eagle true"
        yield ok("eagle", text)


def _odd_blocks(seen: EngineSeen) -> Iterator[Finding]:
    if seen.contents.placeholders:
        text = f"{seen.contents.placeholders} blocks came without tokens (offloaded ones)"
        why = "they count once their device copy was heard of; after a late start they do not"
        fix = 'kv_connector_extra_config {"self_describing_kv_events": true} makes vLLM tell them'
        yield warning("placeholders", text, why, fix)
    partial = seen.trial.stats.counts.partial if seen.trial else 0
    if partial:
        yield ok("partial blocks", f"{partial}, smaller than a block: passed over")


def _copies(seen: EngineSeen, trial: TrialSeen) -> Iterator[Finding]:
    pool = seen.server.facts.total_kv_blocks if seen.server else None
    text = f"{trial.stats.device_copies} copies of {trial.held.counts[0]} blocks on the device"
    fix = 'register with report_mode "full" (a store then says "there is one", not "one more")'
    why = "kv_cache_report_mode full tells held blocks again; counted as copies they never leave"
    if trial.doubts(Doubt.COPIES):
        yield wrong("copies", f"{text}, which has room for {pool}", why, fix)
    elif trial.extra_copies > trial.held.counts[0] and pool is None:
        yield warning("copies", f"{text}: told anew, or very many equal requests", why, fix)
    elif trial.extra_copies:
        yield ok("copies", f"{text}: equal requests that ran at once, counted as such")


def _held(trial: TrialSeen) -> Finding:
    """The verdict of a router's own normaliser over all that was heard."""
    held = ", ".join(
        f"{count} on {word}"
        for word, count in zip(TIER_WORDS.values(), trial.held.counts, strict=True)
        if count
    )
    text = f"a router would hold {held or 'nothing'}"
    doubts = trial.held.doubts & ~(Doubt.HYBRID | Doubt.COPIES)
    if trial.complaints and trial.stats.counts.refused_events:
        fix = "one engine a port; else report it, with the engine's version"
        return wrong("would hold", f"{text}; {trial.complaints[0]}", doubt_text(doubts), fix)
    if doubts:
        why = "answers for this engine would say degraded: a prefix may be missed, none invented"
        fix = "restart it, or clear its cache, once it is registered"
        return warning("would hold", f"{text}, with a doubt: {doubt_text(doubts)}", why, fix)
    return ok("would hold", f"{text}, without a doubt")
