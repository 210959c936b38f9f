"""The groups of layers, as events describe them."""

from router.protocol.hybrid import HybridSettings, Layout
from router.publisher.hybrid.groups import AttentionGroups
from support.engines.engines import batch, stored

FULL = batch(stored([11], [1, 2, 3, 4], spec_kind="full_attention"))


def test_a_model_of_full_attention_has_a_layout_only_if_a_block_of_hits_is_dropped():
    plain, drafting = AttentionGroups(4), AttentionGroups(4, HybridSettings(eagle_groups=(0,)))
    for groups in (plain, drafting):
        groups.note(FULL)
    assert plain.layout is None
    assert drafting.layout == Layout(4, 4, (), is_full_eagle=True)
