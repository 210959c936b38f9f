"""The counts and sizes of a tier's blocks, from which every stride follows.

    block = num_layers × outer_dim × page_size × inner_dim numbers
                         (K, V)     (tokens)    (heads × head_dim of this tensor-parallel rank)

Source: Dynamo's `LayoutConfig`, both generations; the rules have the names of its validation.
"""

from msgspec import Struct

from worker_agent.layout.errors import LayoutError


class LayoutConfig(Struct, frozen=True):
    """Counts and sizes of a tier's blocks. Raises LayoutError if they are inconsistent."""

    num_blocks: int
    """The number of blocks, at least 1."""
    num_layers: int
    """The number of layers, at least 1."""
    outer_dim: int
    """2 for keys and values, 1 if one tensor holds both (MLA)."""
    page_size: int
    """Tokens of a block; a power of two."""
    inner_dim: int
    """Numbers of one token in one layer: heads × head size."""
    dtype_width_bytes: int = 2
    """Bytes of a number: 1, 2, 4 or 8."""
    alignment: int = 1
    """Blocks begin at multiples of this number of bytes; a power of two."""
    num_heads: int | None = None
    """Required where the order within a block matters; divides `inner_dim`."""

    def __post_init__(self) -> None:
        for field in ("num_blocks", "num_layers", "inner_dim"):
            if getattr(self, field) < 1:
                raise self._refusal(field, "at least 1", f"{field}_must_be_positive")
        if self.outer_dim not in (1, 2):
            raise self._refusal("outer_dim", "1 or 2", "outer_dim_must_be_1_or_2")
        if not _is_power_of_two(self.page_size):
            rule = "page_size_must_be_positive_power_of_2"
            raise self._refusal("page_size", "a power of two", rule)
        if self.dtype_width_bytes not in (1, 2, 4, 8):
            rule = "dtype_width_bytes_must_be_power_of_two_and_at_most_8_bytes"
            raise self._refusal("dtype_width_bytes", "1, 2, 4 or 8", rule)
        if not _is_power_of_two(self.alignment):
            raise self._refusal("alignment", "a power of two", "alignment_must_be_power_of_2")
        self._check_heads()

    @property
    def head_dim(self) -> int:
        """The size of a head. Raises LayoutError if the number of heads is unknown."""
        if self.num_heads is None:
            rule = "num_heads_required_for_kv_block_layout"
            raise self._refusal("num_heads", "a divisor of inner_dim", rule)
        return self.inner_dim // self.num_heads

    @property
    def region_bytes(self) -> int:
        """Bytes that are contiguous in every layout: one block, one layer, keys or values."""
        return self.page_size * self.inner_dim * self.dtype_width_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, without padding."""
        return self.num_layers * self.outer_dim * self.region_bytes

    @property
    def required_bytes(self) -> int:
        """Bytes of all blocks, without padding."""
        return self.num_blocks * self.block_bytes

    def _check_heads(self) -> None:
        if self.num_heads is None:
            return
        if self.num_heads < 1 or self.inner_dim % self.num_heads:
            rule = "inner_dim_must_be_divisible_by_num_heads"
            raise self._refusal("num_heads", f"a divisor of inner_dim {self.inner_dim}", rule)

    def _refusal(self, field: str, allowed: str, rule: str) -> LayoutError:
        return LayoutError(field, f"{getattr(self, field)}", allowed, rule=rule)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
