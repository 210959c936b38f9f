"""The places of blocks in a span, for events that list fewer hashes than their tokens contain.

An engine keeps a window's or a state's blocks at a few positions only. Its stored event has the
tokens of the whole span, and the hashes of the blocks that are kept, in order, without their
positions. Block hashes are equal in all groups, and full attention stores every block of the span,
so most hashes are known. In vLLM every run of kept blocks ends where a block of full attention ends
(`single_type_kv_cache_manager.py`), so that an unknown hash stands directly left of its neighbour.
"""

from collections.abc import Iterable, Mapping, Sequence


class BlockNames:
    """The name of each engine hash, and the engine hash of each name. O(1) for each.

    `by_hash` is read only. Of engine hashes with one name, the last is found by it.
    """

    __slots__ = ("_hashes", "by_hash")

    def __init__(self, by_hash: Mapping[int, int] | None = None) -> None:
        self.by_hash: dict[int, int] = {}
        self._hashes: dict[int, int] = {}
        self.update(by_hash or {})

    def update(self, by_hash: Mapping[int, int]) -> None:
        """Add names of engine hashes, or replace them."""
        self.forget(each for each, name in by_hash.items() if self.by_hash.get(each, name) != name)
        self.by_hash.update(by_hash)
        self._hashes.update((name, each) for each, name in by_hash.items())

    def forget(self, hashes: Iterable[int]) -> None:
        """Remove the names of engine hashes; unknown ones are ignored."""
        for each in hashes:
            name = self.by_hash.pop(each, None)
            if name is not None and self._hashes.get(name) == each:
                del self._hashes[name]

    def hash_of(self, name: int) -> int | None:
        """Return the engine hash of a name. Returns None if there is none."""
        return self._hashes.get(name)


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
