"""What engines put into a block's hash beside its tokens."""

import pytest
from xxhash import xxh3_64_intdigest

from router.publisher.engine_events.extra_keys import BlockKeys, EventKeys, mm_hash, read_extra_keys


def read(extra_keys, *, lora_name=None, cache_salt=None, is_root=True, blocks=3):
    return read_extra_keys(extra_keys, EventKeys(lora_name, cache_salt), blocks, is_root=is_root)


def test_a_digest_names_an_object_by_its_start():
    assert mm_hash("00000000000000ff" + "1" * 48) == 255
    assert mm_hash("00000000000000FF" + "1" * 48) == 255


@pytest.mark.parametrize("identifier", ["", "image-1", "f" * 63, "f" * 65, "g" * 64])
def test_any_other_identifier_is_hashed(identifier):
    assert mm_hash(identifier) == xxh3_64_intdigest(identifier.encode())


def test_missing_extra_keys_are_none():
    assert read([None, [], ()]) == EventKeys(None, None)


def test_the_loras_name_is_the_lora():
    assert read([["ad"], ("ad",)], lora_name="ad") == EventKeys("ad", None)


def test_another_name_on_the_first_block_of_a_prompt_is_the_salt():
    assert read([["ad", "s"], ["ad"]], lora_name="ad") == EventKeys("ad", "s")
    assert read([["ad", "ad"]], lora_name="ad") == EventKeys("ad", "ad")


def test_salt_key_equal_to_the_events_salt_adds_nothing():
    assert read([["s"]], cache_salt="s") == EventKeys(None, "s")
    assert read([["s"]], cache_salt="s", is_root=False) == EventKeys(None, "s")


@pytest.mark.parametrize(
    "extra_keys",
    [
        [["s", "t"]],
        [None, ["s"]],
        [[b"digest"]],
        [[["unknown", "x"]]],
        [[["mm", 3, 4]]],
        [[17]],
        ["bare"],
        [{"a": 1}],
    ],
)
def test_unknown_extra_keys_are_opaque(extra_keys):
    is_root = extra_keys != ["bare"]
    keys = read(extra_keys, is_root=is_root)
    (block,) = keys.blocks.values()
    assert block.opaque
    assert not block.mm_hashes


def test_different_opaque_keys_differ():
    first, second = (read([[["unknown", x]]]).blocks[0].opaque for x in "ab")
    assert first != second


def test_objects_are_listed_per_block_tagged_or_not():
    keys = read([[("a", -3), ["mm", "b", 0]], None, [["a", 0]]])
    a, b = mm_hash("a"), mm_hash("b")
    assert keys.blocks == {0: BlockKeys([a, b]), 2: BlockKeys([a])}


def test_tags_name_lora_and_salt():
    tagged = [["lora", "ad", "/p"], ["cache_salt", "s"]]
    assert read([tagged, tagged]) == EventKeys("ad", "s")
    assert read([tagged], lora_name="ad", cache_salt="s") == EventKeys("ad", "s")
    assert read([tagged], lora_name="other").blocks[0].opaque


def test_keys_of_blocks_that_are_not_there_are_passed_over():
    assert read([None, None, None, ["x"]]) == EventKeys(None, None)
