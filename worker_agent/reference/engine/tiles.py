"""Packing of tokens into tiles, so that a token's arithmetic does not depend on the batch.

Floating-point sums depend on the shape of the matrices they are computed in. So everything is
computed in tiles of TILE rows, and the token at position p is always in row p mod TILE: for any
other content of the tile, cold or cached, alone or in a batch, its numbers come from the same
operation at the same place.

    position   …  30  31 │ 32  33  34  …  47 │ 48 …      TILE = 16
    row        …  14  15 │  0   1   2  …  15 │  0 …

Rows of several requests share a tile if they do not collide. A request's later rows are in later
tiles than its earlier ones, because they read the keys and values of those.
"""

from collections.abc import Iterable

from msgspec import Struct

TILE = 16


class Segment(Struct, frozen=True):
    """Consecutive positions of one request within one tile."""

    request: int
    start: int
    stop: int

    @property
    def rows(self) -> range:
        """The rows of the tile, one per position."""
        first = self.start % TILE
        return range(first, first + self.stop - self.start)


class Tile:
    """Segments with disjoint rows."""

    __slots__ = ("_taken", "segments")

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._taken: set[int] = set()

    def has_room(self, segment: Segment) -> bool:
        """Return whether the rows of a segment are free."""
        return self._taken.isdisjoint(segment.rows)

    def add(self, segment: Segment) -> None:
        """Add a segment, and occupy its rows."""
        self.segments.append(segment)
        self._taken.update(segment.rows)


def pack(chunks: Iterable[tuple[int, int, int]]) -> list[Tile]:
    """Return tiles for chunks (request, first position, end), in order of computation."""
    tiles: list[Tile] = []
    for request, start, stop in chunks:
        earliest = 0
        for segment in _segments(request, start, stop):
            earliest = _place(tiles, segment, earliest) + 1
    return tiles


def _segments(request: int, start: int, stop: int) -> Iterable[Segment]:
    while start < stop:
        end = min(stop, start - start % TILE + TILE)
        yield Segment(request, start, end)
        start = end


def _place(tiles: list[Tile], segment: Segment, earliest: int) -> int:
    for index in range(earliest, len(tiles)):
        if tiles[index].has_room(segment):
            tiles[index].add(segment)
            return index
    while len(tiles) <= earliest:
        tiles.append(Tile())
    if not tiles[-1].has_room(segment):
        tiles.append(Tile())
    tiles[-1].add(segment)
    return len(tiles) - 1
