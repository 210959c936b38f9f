"""From engine events to canonical ones: every rule by name."""

import json
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from router.protocol.values import SCHEME, Doubt, Identity, Tier
from router.publisher.normalizer.settings import NormalizerLimits
from support.engines.engines import (
    CLEARED,
    Edge,
    batch,
    engine_hash,
    names,
    placeholder,
    removed,
    stored,
)

VECTORS = json.loads(
    (Path(__file__).parents[3] / "vectors" / "engine_events.json").read_text("utf-8")
)
TOKENS = list(range(1, 41))
A, B, C, D, E = names(TOKENS)[:5]
SALTED = names(TOKENS, cache_salt="s")
FIRST_THREE = stored([11, 22, 33], TOKENS[:12])

ARRAY_FIELDS = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
)


def vector_event(event):
    """An event of the vectors; None for what a decoder would drop."""
    if isinstance(event, list):
        event = {"type": event[0], **dict(zip(ARRAY_FIELDS, event[1:], strict=False))}
        if event["type"] == "BlockRemoved":
            event["medium"] = event.pop("parent_block_hash")
    match event["type"]:
        case "BlockStored" if isinstance(event["block_hashes"], list):
            parent = event["parent_block_hash"]
            return stored(
                [vector_hash(h) for h in event["block_hashes"]],
                event["token_ids"],
                parent if parent is None else engine_hash(vector_hash(parent)),
                block_size=event["block_size"],
                **{k: event.get(k) for k in ("medium", "lora_name", "lora_id", "cache_salt")},
                extra_keys=event.get("extra_keys"),
                group=event.get("group_idx") or 0,
                spec_kind=event.get("kv_cache_spec_kind"),
            )
        case "BlockRemoved":
            return removed([vector_hash(h) for h in event["block_hashes"]], event.get("medium"))
        case "AllBlocksCleared":
            return CLEARED
    return None


def vector_hash(value):
    return bytes.fromhex(value["bytes_hex"]) if isinstance(value, dict) else value


@pytest.mark.parametrize("number", range(len(VECTORS)), ids=lambda n: VECTORS[n]["name"])
def test_held_blocks_equal_the_vectors(number):
    vector = VECTORS[number]
    edge = Edge(clears_lower_tiers=vector["name"].startswith("sglang"))
    applied = vector["expected"]["applied"]
    before = {"after the first": VECTORS[0], "after the previous": VECTORS[number - 1]}
    for event in next((v["decoded"][1] for k, v in before.items() if applied.startswith(k)), ()):
        edge.feed(vector_event(event))
    for event in filter(None, map(vector_event, vector["decoded"][1])):
        edge.feed(event)
    expected = vector["expected"]["held_sequence_hashes_by_tier"]
    for tier in Tier:
        assert edge.held(tier) == set(map(int, expected.get(tier.name.lower(), ())))


# Names


def test_a_child_is_named_behind_its_parent():
    edge = Edge().feed(stored([11], TOKENS[:4]), stored([22, 33], TOKENS[4:12], 11))
    assert edge.held() == {A, B, C}


def test_blocks_of_any_size_are_named_as_the_router_names_them():
    for block_size in (1, 2, 16, 64, 256):
        identity = Identity(SCHEME, block_size)
        tokens = list(range(3 * block_size))
        edge = Edge(identity).feed(stored([1, 2, 3], tokens, block_size=block_size))
        assert edge.held() == set(names(tokens, block_size=block_size))


def test_holes_are_counted_behind_the_right_parents():
    edge = Edge().feed(FIRST_THREE, removed([22]))
    assert edge.journal.state.holes == (1, 1, 1, 1)


def test_windows_of_pairs_are_named_as_the_router_names_them():
    pairs = [token for first in range(1, 9) for token in (first, first + 1)]
    edge = Edge(Identity(SCHEME, 4, eagle=True))
    edge.feed(stored([1, 2], pairs, is_eagle=True))
    assert edge.held() == set(names(range(1, 10), eagle=True))
    edge.feed(stored([3], range(9, 14), 2, is_eagle=True))
    assert edge.held() == set(names(range(1, 14), eagle=True))


@pytest.mark.parametrize(("eagle", "is_eagle"), [(True, False), (False, True)])
def test_tokens_in_another_form_than_registered_are_refused(eagle, is_eagle):
    edge = Edge(Identity(SCHEME, 4, eagle=eagle)).feed(stored([1], range(8), is_eagle=is_eagle))
    assert not edge.held()
    assert edge.counts.refused_events == 1
    assert edge.doubts == Doubt.UNREADABLE


# Copies


def test_a_block_is_held_until_its_last_copy_goes():
    edge = Edge().feed(stored([11], TOKENS[:4]), stored([11], TOKENS[:4]))
    assert edge.feed(removed([11])).held() == {A}
    assert edge.feed(removed([11])).held() == set()


def test_copies_are_counted_per_tier():
    edge = Edge().feed(FIRST_THREE, stored([11], TOKENS[:4], medium="CPU"), removed([11]))
    assert (edge.held(), edge.held(Tier.HOST)) == ({B, C}, {A})
    assert edge.feed(removed([11], "CPU")).held(Tier.HOST) == set()


def test_removing_what_is_not_there_is_ignored_and_counted():
    edge = Edge().feed(FIRST_THREE, removed([11], "CPU"), removed([99]), removed([33]))
    edge.feed(removed([33]))
    assert edge.held() == {A, B}
    assert (edge.counts.over_removed, edge.counts.unknown_removed) == (2, 1)


def test_a_block_of_one_of_two_groups_of_full_attention_is_not_held():
    second = stored([11, 22], TOKENS[:8], group=2, spec_kind="full_attention")
    edge = Edge().feed(stored([11, 22], TOKENS[:8]), second)
    assert edge.held() == {A, B}
    assert edge.feed(removed([22], group=2)).held() == {A}
    assert edge.feed(second, removed([11], group=2)).held() == {A, B}
    assert edge.feed(removed([11])).held() == {B}
    assert edge.feed(CLEARED).held() == set()
    assert edge.doubts == 0


def test_a_tier_without_a_group_does_not_wait_for_it():
    second = stored([11], TOKENS[:4], group=2, spec_kind="full_attention")
    edge = Edge().feed(stored([11], TOKENS[:4]), second, stored([11], TOKENS[:4], medium="CPU"))
    assert (edge.held(), edge.held(Tier.HOST)) == ({A}, {A})


def test_two_names_for_one_block_in_one_group_count_as_two():
    edge = Edge().feed(stored([11], TOKENS[:4]), stored([12], TOKENS[:4]), removed([11]))
    assert edge.held() == {A}
    assert edge.feed(removed([12])).held() == set()


# Contexts


def test_the_salt_of_the_first_block_is_inherited():
    edge = Edge().feed(stored([1], TOKENS[:4], extra_keys=[["s"]]), stored([2], TOKENS[4:8], 1))
    edge.feed(stored([3], TOKENS[8:12], 2))
    assert edge.held() == set(SALTED[:3])


def test_salt_and_lora_are_distinguished_by_the_lora_name():
    edge = Edge().feed(
        stored([1], TOKENS[:4], extra_keys=[["ad", "s"]], lora_name="ad"),
        stored([2], TOKENS[4:8], 1, extra_keys=[["ad"]], lora_name="ad"),
        stored([9], TOKENS[:4], extra_keys=[["ad", "ad"]], lora_name="ad"),
    )
    assert edge.held() == {
        *names(TOKENS[:8], lora_name="ad", cache_salt="s"),
        *names(TOKENS[:4], lora_name="ad", cache_salt="ad"),
    }


def test_a_salt_on_every_event_is_the_same_salt():
    edge = Edge().feed(
        stored([1], TOKENS[:4], cache_salt="s"), stored([2], TOKENS[4:8], 1, cache_salt="s")
    )
    assert edge.held() == set(SALTED[:2])


def test_tagged_keys_are_understood():
    keys = [
        [["lora", "ad", "/path"], ["mm", "a" * 64, 3], ["cache_salt", "s"]],
        [["lora", "ad", "/path"]],
    ]
    edge = Edge().feed(stored([1, 2], TOKENS[:8], extra_keys=keys, lora_name="ad"))
    mm = [[int("a" * 16, 16)]]
    assert edge.held() == set(names(TOKENS[:8], lora_name="ad", cache_salt="s", mm=mm))


def test_multimodal_objects_are_sorted_and_appended():
    digest, name = "f" * 16 + "0" * 48, "image-1"
    keys = [[(digest, 0), (name, 2)], None, [(name, -4)]]
    edge = Edge().feed(stored([1, 2, 3], TOKENS[:12], extra_keys=keys))
    other = xxh3_64_intdigest(name.encode())
    assert edge.held() == set(names(TOKENS[:12], mm=[[int("f" * 16, 16), other], [], [other]]))


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_id": 3},
        {"extra_keys": [[b"\1" * 32]]},
        {"extra_keys": [["salt", "what is this"]]},
        {"extra_keys": [[["cache_salt"]]]},
        {"extra_keys": [{"who": "knows"}]},
    ],
)
def test_unknown_keys_separate_blocks_and_are_counted(fields):
    edge = Edge().feed(stored([1], TOKENS[:4], **fields), stored([2], TOKENS[4:8], 1))
    known = [names(TOKENS[:8]), names(TOKENS[:8], cache_salt="salt")]
    assert len(edge.held()) == 2
    assert edge.held().isdisjoint(n for each in known for n in each)
    assert edge.feed(removed([1])).feed(removed([2])).held() == set()
    assert edge.doubts == 0


def test_a_name_beside_the_loras_behind_the_first_block_is_opaque():
    edge = Edge().feed(FIRST_THREE, stored([44], TOKENS[12:16], 33, extra_keys=[["s"]]))
    assert edge.held() > {A, B, C}
    assert D not in edge.held()


def test_different_lora_ids_are_different_contexts():
    edge = Edge().feed(*(stored([n], TOKENS[:4], lora_id=n) for n in (1, 2)))
    assert len(edge.held()) == 2


def test_contexts_are_bounded_and_further_ones_match_nothing():
    edge = Edge(limits=NormalizerLimits(contexts=2))
    for n in range(4):
        edge.feed(stored([n], TOKENS[:4], cache_salt=f"s{n}"))
    asked = {names(TOKENS[:4], cache_salt=f"s{n}")[0] for n in range(4)}
    assert len(edge.held() & asked) == 2
    assert edge.counts.untold_contexts == 2
    edge.feed(stored([9], TOKENS[4:8], 3, cache_salt="s3"), removed([2, 3]))
    assert edge.held() & asked == {names(TOKENS[:4], cache_salt=f"s{n}")[0] for n in range(2)}


def test_contexts_of_forgotten_blocks_make_room():
    edge = Edge(limits=NormalizerLimits(contexts=1, known_blocks=1))
    for n in range(4):
        edge.feed(stored([n], TOKENS[:4], cache_salt=f"s{n}"))
        assert edge.held() == set(names(TOKENS[:4], cache_salt=f"s{n}"))
        edge.feed(removed([n]))
    assert edge.counts.untold_contexts == 0


# Tiers


def test_a_tier_event_without_tokens_is_joined_to_the_block_it_names():
    edge = Edge().feed(FIRST_THREE, placeholder([11, 22]))
    assert edge.held(Tier.HOST) == {A, B}
    assert edge.feed(CLEARED).held(Tier.HOST) == {A, B}
    assert edge.journal.state.holes == (0, 0, 0, 0)


def test_a_tier_event_may_come_after_the_device_copy_is_gone():
    edge = Edge().feed(FIRST_THREE, removed([33, 22, 11]), placeholder([22, 33, 11], medium="DISK"))
    assert edge.held(Tier.DISK) == {A, B, C}
    assert edge.journal.state.holes == (0, 0, 0, 0)
    edge.feed(removed([11], "DISK"))
    assert edge.journal.state.holes == (0, 0, 1, 1)


def test_tier_event_of_an_unknown_block_is_an_orphan_until_it_is_stored():
    edge = Edge().feed(placeholder([11, 22]), placeholder([22], medium="DISK"))
    assert (edge.orphans, edge.counts.unnamed_tier) == (2, 3)
    assert edge.doubts == Doubt.ORPHANS
    edge.feed(FIRST_THREE)
    assert (edge.held(), edge.held(Tier.HOST), edge.held(Tier.DISK)) == ({A, B, C}, {A, B}, {B})
    assert edge.doubts == 0


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        *((medium, Tier.DEVICE) for medium in (None, "", "GPU", "DEVICE", "gpu")),
        *((medium, Tier.HOST) for medium in ("CPU", "CPU_PINNED", "CPU_TIER1")),
        *((medium, Tier.DISK) for medium in ("CPU_TIER2", "DISK", "NVME", "STORAGE")),
        *((medium, Tier.REMOTE) for medium in ("EXTERNAL", "NETWORK", "REMOTE", "SHARED")),
    ],
)
def test_a_medium_is_a_tier(medium, tier):
    edge = Edge().feed(stored([11], TOKENS[:4], medium=medium))
    assert edge.held(tier) == {A}


def test_an_unknown_medium_is_not_credited_and_counted_but_names_blocks():
    edge = Edge().feed(stored([11, 22], TOKENS[:8], medium="CXL"), placeholder([11], medium="CXL"))
    assert not any(edge.held(tier) for tier in Tier)
    edge.feed(removed([11], "CXL"), stored([33], TOKENS[8:12], 22), placeholder([22]))
    assert (edge.held(), edge.held(Tier.HOST)) == ({C}, {B})
    assert (edge.counts.unknown_medium, edge.doubts) == (4, 0)


def test_retired_rows_are_limited_to_twice_the_pool():
    edge = Edge(num_gpu_blocks=2)
    for n in range(5):
        edge.feed(stored([n], TOKENS[n : n + 4]), removed([n]))
    assert edge.normalizer.stats.dead_blocks == 4
    edge.feed(placeholder([0]))
    assert (edge.orphans, edge.held(Tier.HOST)) == (1, set())
    edge.feed(placeholder([1, 2, 3, 4]))
    assert edge.held(Tier.HOST) == {names(TOKENS[n : n + 4])[0] for n in range(1, 5)}


def test_a_parent_stays_known_while_it_has_children():
    edge = Edge(num_gpu_blocks=1).feed(FIRST_THREE, removed([11, 22]))
    for n in range(100, 120):
        edge.feed(stored([n], TOKENS[n - 90 : n - 86]), removed([n]))
    edge.feed(placeholder([11, 22]))
    assert edge.held(Tier.HOST) == {A, B}


# Orphans


def test_a_child_that_comes_before_its_parent_is_named_with_it():
    edge = Edge().feed(stored([33], TOKENS[8:12], 22), stored([44], TOKENS[12:16], 33))
    assert (edge.held(), edge.orphans, edge.doubts) == (set(), 2, Doubt.ORPHANS)
    edge.feed(stored([22], TOKENS[4:8], 11), removed([33]))
    assert (edge.held(), edge.orphans) == (set(), 2)
    edge.feed(stored([11], TOKENS[:4]))
    assert (edge.held(), edge.orphans, edge.doubts) == ({A, B, D}, 0, 0)
    assert edge.counts.resolved == 3


def test_an_orphan_is_held_in_every_tier_it_was_counted_in():
    edge = Edge().feed(stored([22], TOKENS[4:8], 11), placeholder([22]), stored([11], TOKENS[:4]))
    assert (edge.held(), edge.held(Tier.HOST)) == ({A, B}, {B})


def test_tokens_are_kept_for_two_seconds_then_the_hash_alone():
    edge = Edge().feed(stored([22], TOKENS[4:8], 11))
    edge.now_s += 2.0
    edge.normalizer.tick(edge.now_s)
    assert edge.normalizer.stats.waiting_blocks == 0
    edge.feed(stored([11], TOKENS[:4]))
    assert (edge.held(), edge.orphans, edge.counts.given_up) == ({A}, 1, 1)
    edge.feed(removed([22]))
    assert (edge.orphans, edge.counts.unknown_removed, edge.doubts) == (0, 0, 0)


def test_an_orphan_that_is_stored_again_is_none_any_more():
    edge = Edge().feed(stored([22], TOKENS[4:8], 11))
    edge.now_s += 3.0
    edge.feed(stored([11, 22], TOKENS[:8]))
    assert (edge.held(), edge.orphans) == ({A, B}, 0)
    assert edge.feed(removed([22])).held() == {A, B}
    assert edge.feed(removed([22])).held() == {A}


def test_children_held_back_are_bounded_and_the_oldest_given_up():
    edge = Edge(limits=NormalizerLimits(held_back_blocks=2))
    edge.feed(*(stored([n], TOKENS[4:8], n + 100) for n in range(3)))
    assert (edge.normalizer.stats.waiting_blocks, edge.orphans) == (2, 3)
    edge.feed(*(stored([n + 100], TOKENS[n : n + 4]) for n in range(3)))
    assert (edge.counts.given_up, edge.counts.resolved, edge.orphans) == (1, 2, 1)
    edge.feed(stored(range(200, 203), TOKENS[:12], 99))
    assert edge.normalizer.stats.waiting_blocks == 0


def test_an_orphans_context_is_that_of_its_parent():
    edge = Edge().feed(stored([2], TOKENS[4:8], 1), stored([1], TOKENS[:4], cache_salt="s"))
    assert edge.held() == set(SALTED[:2])


# Groups


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention"])
def test_kinds_of_full_attention_are_credited_in_any_group(kind):
    edge = Edge().feed(stored([11], TOKENS[:4], group=3, spec_kind=kind))
    assert (edge.held(), edge.doubts) == ({A}, 0)
    assert edge.feed(removed([11], group=3)).held() == set()


@pytest.mark.parametrize("kind", ["mamba", "chunked_local_attention", "unknown", "of the future"])
def test_no_other_kind_is_credited_in_group_0_either(kind):
    assert not Edge().feed(stored([11], TOKENS[:4], spec_kind=kind)).held()


def test_where_no_kind_is_said_group_0_is_credited_and_others_are_not():
    edge = Edge().feed(stored([11], TOKENS[:4]), stored([12], TOKENS[4:8], group=1))
    assert (edge.held(), edge.doubts) == ({A}, Doubt.HYBRID)


# What cannot be


def test_a_smaller_block_is_a_partial_one_ignored_and_counted():
    edge = Edge().feed(stored([11], TOKENS[:3], block_size=3))
    assert (edge.held(), edge.counts.partial, edge.doubts) == (set(), 1, 0)


@pytest.mark.parametrize(
    "event",
    [
        stored([11], TOKENS[:8], block_size=8),
        stored([11, 22], TOKENS[:6], block_size=3),
        stored([11], TOKENS[:4], block_size=0),
        stored([11, 22], TOKENS[:7]),
        stored([11], []),
        stored([11, 11], TOKENS[:8]),
        stored([11], TOKENS[:4], 11),
        stored([*range(50), 3], range(51 * 4)),
        placeholder([11, 11]),
    ],
)
def test_impossible_event_is_refused_with_a_warning(event):
    edge = Edge().feed(event)
    assert not any(edge.held(tier) for tier in Tier)
    assert (edge.counts.refused_events, edge.doubts) == (1, Doubt.UNREADABLE)
    (complaint,) = edge.normalizer.take_complaints()
    assert complaint.startswith("stored event refused: ")
    assert not edge.normalizer.take_complaints()


def test_a_held_block_that_comes_with_other_tokens_is_refused():
    edge = Edge().feed(FIRST_THREE, stored([22], TOKENS[:4], 11), stored([22], TOKENS[4:8]))
    assert (edge.held(), edge.counts.refused_events) == ({A, B, C}, 2)


def test_a_forgotten_name_may_be_given_anew():
    edge = Edge().feed(FIRST_THREE, removed([33]), stored([33], TOKENS[20:24]))
    assert edge.held() == {A, B, names(TOKENS[20:24])[0]}


def test_a_store_of_nothing_is_nothing():
    edge = Edge().feed(stored([], []), stored([], [], 99), placeholder([]), removed([]))
    assert (edge.counts.stored, edge.counts.held_back, edge.doubts) == (0, 0, 0)


def test_complaints_are_bounded():
    edge = Edge().feed(*(stored([11], []) for _ in range(100)))
    assert (len(edge.normalizer.take_complaints()), edge.counts.refused_events) == (16, 100)


def test_dropped_events_of_known_blocks_are_doubts():
    edge = Edge().feed(FIRST_THREE, unknown=["BlockPinned"])
    assert (edge.counts.unknown_events, edge.doubts) == (1, 0)
    edge.feed(malformed=["block_hashes: not a list"])
    assert (edge.counts.malformed_events, edge.doubts) == (1, Doubt.UNREADABLE)


def test_unknown_field_is_a_doubt_until_the_cache_is_empty():
    edge = Edge(has_lower_tiers=False).feed(FIRST_THREE, unknown_field="field 12")
    edge.feed(unknown_field="field 13")
    assert (edge.held(), edge.doubts) == ({A, B, C}, Doubt.UNKNOWN_FIELDS)
    assert edge.normalizer.unknown_field == "field 12"
    edge.feed(CLEARED)
    assert (edge.doubts, edge.normalizer.unknown_field) == (0, None)
    edge.feed(CLEARED, unknown_field="field 1")
    assert edge.doubts == Doubt.UNKNOWN_FIELDS
    edge.normalizer.events_lost()
    assert (edge.doubts, edge.normalizer.unknown_field) == (Doubt.EVENTS_LOST, None)


def test_doubt_of_a_field_is_saved_and_its_name_comes_with_the_next_batch():
    edge, other = Edge().feed(FIRST_THREE, unknown_field="field 12"), Edge()
    other.normalizer.load(b"".join(edge.normalizer.save()), 0.0)
    assert (other.doubts, other.normalizer.unknown_field) == (Doubt.UNKNOWN_FIELDS, None)
    other.feed(unknown_field="field 12")
    assert other.normalizer.unknown_field == "field 12"


def test_hybrid_model_whose_events_are_of_full_attention_alone_is_never_exact():
    edge = Edge(has_full_only=True).feed(FIRST_THREE, CLEARED)
    assert (edge.held(), edge.doubts) == (set(), Doubt.HYBRID)
    edge.normalizer.events_lost()
    assert edge.doubts == Doubt.HYBRID | Doubt.EVENTS_LOST


def test_hybrid_model_that_a_batch_shows_is_one_until_the_next_life():
    edge, other = Edge().feed(FIRST_THREE, has_full_only=True), Edge()
    assert edge.feed(CLEARED).doubts == Doubt.HYBRID
    other.normalizer.load(b"".join(edge.normalizer.save()), 0.0)
    assert other.doubts == other.feed(FIRST_THREE).doubts == Doubt.HYBRID
    other.normalizer.reset()
    assert other.doubts == 0


def test_known_blocks_are_bounded_and_further_ones_refused():
    edge = Edge(limits=NormalizerLimits(known_blocks=4))
    edge.feed(FIRST_THREE, stored([44, 55], TOKENS[12:20], 33))
    assert (edge.held(), edge.doubts) == ({A, B, C}, Doubt.UNREADABLE)
    edge.feed(removed([33]), stored([66, 77], TOKENS[:8][::-1]))
    assert edge.held() == {A, B, *names(TOKENS[:8][::-1])}


# Reports


def test_in_full_mode_a_store_never_raises_a_known_count():
    edge = Edge(report_mode="full").feed(FIRST_THREE, FIRST_THREE, removed([33]))
    assert edge.held() == {A, B}
    edge.feed(FIRST_THREE, placeholder([11]), placeholder([11]), removed([11], "CPU"))
    assert (edge.held(), edge.held(Tier.HOST)) == ({A, B, C}, set())


def test_in_full_mode_a_repeated_block_may_be_a_copy():
    edge = Edge(report_mode="full").feed(FIRST_THREE)
    assert edge.doubts == 0
    assert edge.feed(FIRST_THREE).doubts == Doubt.UNCOUNTED
    assert edge.normalizer.stats.counts.uncounted == 3
    assert edge.feed(CLEARED).doubts == 0
    assert edge.feed(FIRST_THREE).doubts == 0


@pytest.mark.parametrize("locality", ["REMOTE", "SOMEWHERE"])
def test_blocks_that_lie_elsewhere_are_not_credited(locality):
    edge = Edge().feed(FIRST_THREE, stored([44], TOKENS[12:16], 33, locality=locality))
    assert edge.held() == {A, B, C}
    assert edge.normalizer.stats.counts.unknown_medium == 1
    edge.feed(stored([44], TOKENS[12:16], 33, locality="LOCAL"))
    assert len(edge.held()) == 4


@pytest.mark.parametrize("report_mode", ["new", "full"])
def test_more_copies_than_the_device_has_blocks_prove_inflation(report_mode):
    edge = Edge(num_gpu_blocks=3, report_mode=report_mode).feed(FIRST_THREE)
    assert edge.doubts == 0
    edge.feed(stored([44], TOKENS[12:16], 33))
    assert edge.doubts == Doubt.COPIES
    edge.feed(removed([44]))
    assert edge.doubts == Doubt.COPIES
    assert edge.feed(CLEARED).doubts == 0


def test_more_copies_than_can_be_counted_are_doubted():
    edge = Edge()
    for _ in range(70):
        edge.normalizer.apply(batch(*[stored([11], TOKENS[:4])] * 1_000), 0.0)
    edge.normalizer.check_invariants()
    assert edge.doubts == Doubt.COPIES


# Clears


def test_a_clear_empties_the_device_exactly():
    edge = Edge().feed(FIRST_THREE, stored([44], TOKENS[:4], 99), CLEARED)
    assert (edge.held(), edge.orphans, edge.doubts) == (set(), 0, 0)
    edge.feed(removed([11]))
    assert edge.counts.over_removed == 1


def test_lower_tiers_are_doubted_after_a_clear_until_they_are_empty():
    edge = Edge().feed(FIRST_THREE, placeholder([11]), CLEARED)
    assert (edge.held(), edge.held(Tier.HOST)) == (set(), {A})
    assert edge.doubts == Doubt.LOWER_TIERS
    assert edge.feed(removed([11], "CPU")).doubts == 0


def test_an_engine_that_clears_lower_tiers_leaves_no_doubt():
    edge = Edge(clears_lower_tiers=True).feed(FIRST_THREE, placeholder([11, 99]), CLEARED)
    assert (edge.held(), edge.held(Tier.HOST), edge.doubts) == (set(), set(), 0)


def test_complete_clear_ends_all_doubts():
    edge = Edge(num_gpu_blocks=2).feed(FIRST_THREE, malformed=["?"])
    assert edge.doubts == Doubt.UNREADABLE | Doubt.COPIES
    assert edge.feed(CLEARED).doubts == 0


def test_lost_events_leave_nothing_held_and_a_doubt():
    edge = Edge(has_lower_tiers=False).feed(FIRST_THREE)
    edge.normalizer.events_lost()
    assert (edge.held(), edge.doubts) == (set(), Doubt.EVENTS_LOST)
    edge.feed(stored([44], TOKENS[12:16], 33), removed([22]))
    assert (edge.orphans, edge.counts.unknown_removed) == (1, 1)
    assert edge.feed(CLEARED).doubts == 0


def test_after_lost_events_the_device_alone_is_not_all():
    edge = Edge()
    edge.normalizer.events_lost()
    assert edge.feed(CLEARED).doubts == Doubt.EVENTS_LOST


def test_a_new_life_begins_with_nothing_and_keeps_the_totals():
    edge = Edge().feed(FIRST_THREE, removed([99]), malformed=["?"])
    edge.normalizer.reset()
    assert (edge.held(), edge.doubts, edge.counts.unknown_removed) == (set(), 0, 1)
    assert edge.feed(FIRST_THREE).held() == {A, B, C}
    assert edge.counts.stored == 6
