"""The places of blocks in a span, for events that list fewer hashes than their tokens contain.

An engine keeps a window's or a state's blocks at a few positions only. Its stored event has the
tokens of the whole span, and the hashes of the blocks that are kept, in order, without their
positions. Block hashes are equal in all groups, and full attention stores every block of the span,
so most hashes are known. In vLLM every run of kept blocks ends where a block of full attention ends
(`single_type_kv_cache_manager.py`), so that an unknown hash stands directly left of its neighbour.
"""

from collections.abc import Mapping, Sequence


def placed(
    hashes: Sequence[int], known: Mapping[int, int], ends: Sequence[int], *, may_fill: bool
) -> dict[int, int]:
    """Return the name of each hash of an event that has a place, from the right to the left.

    `known`: names of hashes; `ends`: the name at the end of each block of the span. `may_fill`: an
    unknown hash stands left of its right neighbour. A hash without a place ends the search: those
    before it have none. O(blocks of the span).
    """
    index = {name: place for place, name in enumerate(ends)}
    if len(hashes) == len(ends):
        return dict(zip(hashes, ends, strict=True))
    names: dict[int, int] = {}
    right: int | None = None
    for each in reversed(hashes):
        name = known.get(each)
        if name is not None:
            place = index.get(name)
        else:
            place = right - 1 if may_fill and right is not None else None
        if place is None or place < 0:
            return names
        names[each], right = ends[place], place
    return names
