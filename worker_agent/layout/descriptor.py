"""A layout as JSON, from which a peer computes the addresses of blocks in the owner's memory.

Source: Dynamo's `LayoutDescriptor`, version 1. Addresses and sizes are whole 64-bit integers.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from router.protocol.values import U64_MAX, UNREADABLE
from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.errors import LayoutError, RegionError
from worker_agent.layout.layout import Layout, MemoryRegion
from worker_agent.layout.strides import LayoutKind

VERSION = 1

Natural = Annotated[int, Meta(ge=0)]
Location = Literal["System", "Pinned"] | dict[Literal["Device", "Disk"], Natural]
BlockOrderName = Literal[
    "UniversalTP", "UniversalPP", "OperationalHND", "OperationalNHD", "Unknown"
]


class MemoryDescriptor(Struct, frozen=True):
    """A region of memory, in the owner's addresses."""

    addr: Natural
    size: Natural

    def __post_init__(self) -> None:
        if self.addr + self.size > U64_MAX:  # msgspec supports no bound above an i64.
            rule = "region_within_address_space"
            raise RegionError("memory_descriptors", f"{self.addr}", "64-bit addresses", rule=rule)


class AgentMetadata(Struct, frozen=True):
    """The name and device under which the owner's memory can be reached."""

    agent_name: str
    mem_type: str
    device_id: Natural


class FullyContiguousDetails(Struct, frozen=True):
    """A contiguous layout: each block in one piece."""

    kv_block_layout: BlockOrderName = "Unknown"
    block_format: Literal["Operational"] = "Operational"


class LayerSeparateDetails(Struct, frozen=True):
    """A layout with one region per layer."""

    block_dim: Literal["BlockIsFirstDim", "BlockIsSecondDim"]
    kv_block_layout: BlockOrderName = "Unknown"


class LayoutDetails(Struct, frozen=True, omit_defaults=True):
    """The details of one of the two layout types."""

    FullyContiguous: FullyContiguousDetails | None = None
    LayerSeparate: LayerSeparateDetails | None = None

    def __post_init__(self) -> None:
        if (self.FullyContiguous is None) == (self.LayerSeparate is None):
            allowed = "FullyContiguous or LayerSeparate"
            rule = "one_layout_type"
            raise LayoutError("layout_type_details", "both or none", allowed, rule=rule)

    @property
    def kind(self) -> LayoutKind:
        """The layout's kind."""
        if self.LayerSeparate is None:
            return LayoutKind.CONTIGUOUS
        is_first = self.LayerSeparate.block_dim == "BlockIsFirstDim"
        return LayoutKind.BLOCK_FIRST if is_first else LayoutKind.BLOCK_SECOND


class LayoutDescriptor(Struct, frozen=True):
    """The facts that a peer needs about a layout."""

    layout_config: LayoutConfig
    location: Location
    nixl_metadata: AgentMetadata
    memory_descriptors: tuple[MemoryDescriptor, ...]
    layout_type_details: LayoutDetails
    version: Annotated[int, Meta(ge=1)] = VERSION

    def layout(self) -> Layout:
        """Return the layout, over memory that only its owner can read. Raises RegionError."""
        regions = [MemoryRegion(each.addr, each.size) for each in self.memory_descriptors]
        return Layout(self.layout_config, self.layout_type_details.kind, regions)


def described(
    layout: Layout, location: Location, metadata: AgentMetadata, order: BlockOrderName = "Unknown"
) -> LayoutDescriptor:
    """Return the descriptor of a layout of this process.

    Raises LayoutError for an order that memory by layer cannot have.
    """
    return LayoutDescriptor(
        layout.config,
        location,
        metadata,
        tuple(MemoryDescriptor(each.address, each.size_bytes) for each in layout.regions),
        _details(layout.kind, order),
    )


def encode_descriptor(descriptor: LayoutDescriptor) -> bytes:
    """Encode a descriptor as JSON."""
    return msgspec.json.encode(descriptor)


def decode_descriptor(data: bytes) -> LayoutDescriptor:
    """Decode a descriptor from JSON. Raises LayoutError, also if it makes no valid layout."""
    try:
        descriptor = msgspec.json.decode(data, type=LayoutDescriptor)
    except UNREADABLE as error:
        raise LayoutError("descriptor", str(error), "JSON of version 1", rule="serde") from error
    if descriptor.version > VERSION:
        raise LayoutError(
            "version", f"{descriptor.version}", f"at most {VERSION}", rule="version_not_supported"
        )
    descriptor.layout()
    return descriptor


def _details(kind: LayoutKind, order: BlockOrderName) -> LayoutDetails:
    match kind:
        case LayoutKind.CONTIGUOUS:
            return LayoutDetails(FullyContiguous=FullyContiguousDetails(order))
        case _ if order.startswith("Universal"):
            rule = "layer_separate_requires_operational_order"
            raise LayoutError("kv_block_layout", order, "an operational order", rule=rule)
        case LayoutKind.BLOCK_FIRST:
            return LayoutDetails(LayerSeparate=LayerSeparateDetails("BlockIsFirstDim", order))
        case LayoutKind.BLOCK_SECOND:
            return LayoutDetails(LayerSeparate=LayerSeparateDetails("BlockIsSecondDim", order))
