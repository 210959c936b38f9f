"""The layers of a hybrid model that are not full attention, and what a rank holds for them.

Layers of full attention need every block of a prefix. Windows, states and chunks need some blocks
only, so an engine keeps few of them, and a cached prefix can be resumed only where these are held.
Groups of layers of equal kind and shape form a class; a class holds a block if each of its groups
does. Blocks of classes are on the device: events and checkpoints list them beside the tiers.

Source: vLLM's `v1/core/kv_cache_coordinator.py`, `single_type_kv_cache_manager.py`.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from router.protocol.values import U64, UInt

MAX_CLASSES = 4
"""Classes of a rank; an agent that sees more describes the first, and names the problem."""

MAX_GROUPS = 256
"""Groups of layers of a rank; events of others are ignored, and name the problem."""

GroupNumber: TypeAlias = Annotated[int, Meta(ge=0, le=65_535)]

ClassKind: TypeAlias = Literal["window", "state", "chunk", "tail"]

BlockTokens: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 20)]


class HybridSettings(Struct, frozen=True, cache_hash=True):
    """The part of a hybrid model's layout that no event contains; registered with the worker.

    `chunk_tokens`: the span of chunked local attention. `eagle_groups`: the groups whose last block
    the engine drops from a hit, as draft layers use them. `silent_block_sizes`: the block sizes of
    groups that are never cached, and so have no events.
    """

    chunk_tokens: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None
    eagle_groups: Annotated[tuple[GroupNumber, ...], Meta(max_length=MAX_GROUPS)] = ()
    silent_block_sizes: Annotated[tuple[BlockTokens, ...], Meta(max_length=MAX_GROUPS)] = ()


NO_SETTINGS = HybridSettings()


class LayerClass(Struct, frozen=True, array_like=True, gc=False, cache_hash=True):
    """Groups of layers of one kind and shape.

    `window`: a query sees the last `span_tokens` tokens, its own included; `chunk`: those since the
    last multiple of `span_tokens`; `state`: the state at a block's end stands for everything before
    it; `tail`: not a kind of layers, but places inside blocks of full attention where hits may end.
    The last two have a `span_tokens` of 0. `is_eagle`: its engine drops the last block of a hit.
    """

    kind: ClassKind
    block_tokens: BlockTokens
    span_tokens: Annotated[int, Meta(ge=0, le=1 << 30)] = 0
    is_eagle: bool = False

    def __post_init__(self) -> None:
        if (self.kind in ("state", "tail")) != (self.span_tokens == 0):
            raise ValueError(f"{self.kind} with a span of {self.span_tokens} tokens")


class Layout(Struct, frozen=True, array_like=True, cache_hash=True):
    """The groups of a hybrid model, as its engine looks them up.

    Hits end at multiples of `alignment_tokens`, which is a multiple of every block size, unless
    they may end inside blocks: then there is a class of kind `tail`. `full_block_tokens`: the block
    size of full attention, 0 if the model has none; a multiple of the identity's block size, in
    which all blocks are counted. `problem`: the first condition of exactness that fails; empty if
    none does.
    """

    alignment_tokens: BlockTokens
    full_block_tokens: Annotated[int, Meta(ge=0, le=1 << 20)]
    classes: Annotated[tuple[LayerClass, ...], Meta(max_length=MAX_CLASSES)] = ()
    is_full_eagle: bool = False
    problem: Annotated[str, Meta(max_length=256)] = ""


class HybridState(Struct, frozen=True, array_like=True):
    """The layout of a rank, and the blocks of each class after a message, in summary.

    `counts[c]` and `digests[c]` (XOR of a mix of the hashes) describe class c.
    """

    layout: Layout
    counts: Annotated[tuple[UInt, ...], Meta(max_length=MAX_CLASSES)] = ()
    digests: Annotated[tuple[U64, ...], Meta(max_length=MAX_CLASSES)] = ()

    def __post_init__(self) -> None:
        if not len(self.counts) == len(self.digests) == len(self.layout.classes):
            raise ValueError("one count and one digest for each class")
