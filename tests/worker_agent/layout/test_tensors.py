"""What tensors say of their layout: what fits one is taken, what fits two is refused."""

import pytest
import torch

from router.block_errors import LayoutError
from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.strides import LayoutKind
from worker_agent.layout.tensors import InnerShape, common_shape, inner_shape, layer_kind


def config(num_blocks=8, outer_dim=2):
    return LayoutConfig(
        num_blocks=num_blocks, num_layers=3, outer_dim=outer_dim, page_size=4, inner_dim=16
    )


def test_a_layer_says_which_dimension_is_first():
    assert layer_kind([8, 2, 4, 2, 8], config()) is LayoutKind.BLOCK_FIRST
    assert layer_kind([2, 8, 4, 16], config()) is LayoutKind.BLOCK_SECOND
    assert layer_kind([8, 4, 16], config(outer_dim=1)) is LayoutKind.BLOCK_FIRST


@pytest.mark.parametrize(
    ("shape", "of", "said"),
    [
        ([2, 2, 4, 16], config(num_blocks=2), "fits both"),
        ([8, 4, 16], config(), "fits none"),
        ([8, 2, 4, 17], config(), "fits none"),
        ([9, 2, 4, 16], config(), "fits none"),
        ([], config(), "fits none"),
    ],
)
def test_what_fits_two_or_none_is_refused(shape, of, said):
    with pytest.raises(LayoutError, match=said) as refused:
        layer_kind(shape, of)
    assert refused.value.rule == "layout_is_ambiguous"


def test_tensors_of_a_group_have_one_shape():
    assert common_shape([torch.zeros(2, 3), torch.zeros(2, 3)]) == (2, 3)
    with pytest.raises(LayoutError, match="at least one"):
        common_shape([])
    with pytest.raises(LayoutError, match=r"\[2, 3\] and \[3, 2\]"):
        common_shape([torch.zeros(2, 3), torch.zeros(3, 2)])


def test_strides_confirm_an_order():
    assert inner_shape([torch.zeros(4, 2, 8)]) is InnerShape.NHD
    assert inner_shape([torch.zeros(4, 2)]) is InnerShape.UNKNOWN
    with pytest.raises(LayoutError, match="none that grows"):
        inner_shape([torch.zeros(4, 2, 8).transpose(0, 1)])
    with pytest.raises(LayoutError, match="1 dimensions"):
        inner_shape([torch.zeros(4)])
