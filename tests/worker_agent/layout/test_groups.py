"""Groups of layers: a tensor of exactly one, of exactly its shape."""

import pytest
import torch

from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.errors import LayoutError
from worker_agent.layout.groups import LayoutGroup, grouped
from worker_agent.layout.strides import LayoutKind


def config(**fields):
    sizes = {"num_blocks": 8, "num_layers": 2, "outer_dim": 2, "page_size": 4, "inner_dim": 16}
    return LayoutConfig(**{**sizes, **fields})


ATTENTION = LayoutGroup("attention", ("0", "1"), config(), LayoutKind.BLOCK_SECOND)
LATENT = LayoutGroup(
    "latent", ("2",), config(num_layers=1, outer_dim=1, inner_dim=9), LayoutKind.BLOCK_FIRST
)


def tensor(*shape, dtype=torch.float16):
    return torch.zeros(shape, dtype=dtype)


def tensors(**others):
    return {"0": tensor(2, 8, 4, 2, 8), "1": tensor(2, 8, 4, 16), "2": tensor(8, 4, 9), **others}


def test_each_group_has_its_tensors_in_order():
    of = tensors()
    assert grouped(of, [LATENT, ATTENTION]) == {
        "latent": [of["2"]],
        "attention": [of["0"], of["1"]],
    }


def test_contiguous_blocks_have_one_shape_for_all_layers():
    group = LayoutGroup("all", ("x", "y"), config(), LayoutKind.CONTIGUOUS)
    whole = tensor(8, 2, 2, 4, 16)
    assert grouped({"x": whole, "y": whole}, [group])["all"] == [whole, whole]


@pytest.mark.parametrize(
    ("change", "rule", "said"),
    [
        ({"3": tensor(1)}, "tensor_in_no_group", "3 in no group"),
        ({"2": tensor(4, 8, 9)}, "tensor_shape_mismatch", r"2: shape \[4, 8, 9\]"),
        ({"2": tensor(8, 2, 4, 9)}, "tensor_shape_mismatch", "a page of 36 numbers"),
        ({"1": tensor(8, 2, 4, 16)}, "tensor_shape_mismatch", "as attention requires"),
        ({"1": tensor(2, 8, 4, 16, dtype=torch.float32)}, "dtype_width_mismatch", "float32"),
        (
            {"1": tensor(2, 8, 16, 4).transpose(2, 3)},
            "strides_must_not_increase",
            "non-increasing ones",
        ),
    ],
)
def test_tensor_that_does_not_fit_its_group_is_refused(change, rule, said):
    with pytest.raises(LayoutError, match=said) as refused:
        grouped(tensors(**change), [ATTENTION, LATENT])
    assert refused.value.rule == rule


def test_a_layer_is_in_one_group_and_has_a_tensor():
    twice = LayoutGroup("twice", ("1",), config(num_layers=1), LayoutKind.BLOCK_SECOND)
    with pytest.raises(LayoutError, match="1 is in attention and twice"):
        grouped(tensors(), [ATTENTION, LATENT, twice])
    with pytest.raises(LayoutError, match="2 of latent has no tensor"):
        grouped({"0": tensor(2, 8, 4, 16), "1": tensor(2, 8, 4, 16)}, [ATTENTION, LATENT])
    with pytest.raises(LayoutError, match=r"layers: 3 of x \(allowed: 2, as in num_layers\)"):
        LayoutGroup("x", ("a", "b", "c"), config(), LayoutKind.BLOCK_FIRST)
