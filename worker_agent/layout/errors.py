"""Errors of layouts: descriptions of the memory of blocks."""

from router.errors import KvRouterError


class LayoutError(KvRouterError):
    """A description of a block's memory that is inconsistent, or does not fit that memory.

    `rule`: the broken rule, by Dynamo's name if it has one.
    """

    code = "layout"

    def __init__(self, field: str, reason: str, allowed: str, *, rule: str) -> None:
        super().__init__(f"{field}: {reason} (allowed: {allowed})")
        self.field = field
        self.rule = rule


class BlockIndexError(LayoutError):
    """An index of a block, layer or outer dimension that does not exist."""

    code = "block_index"

    def __init__(self, field: str, index: int, count: int) -> None:
        super().__init__(field, f"{index}", f"0 to {count - 1}", rule=f"{field}_out_of_range")
        self.index = index
        self.count = count


class RegionError(LayoutError):
    """Memory that is not what a layout needs."""

    code = "layout_region"
