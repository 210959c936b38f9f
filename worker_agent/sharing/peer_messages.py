"""The messages of two workers that exchange blocks, and the order in which they are sent.

server  Challenge ─▶                    ◀─ Proof        client
        Welcome (its proof), or Refused ─▶
                                        ◀─ Get, GetNamed, Put, Find, End,
                                           Reserve, or Complete
        Sent, then blocks ─▶  (Get)
        or Mapped, a file ─▶            ◀─ Taken        (Get on one host: shared memory)
        or Readable, then proofs ─▶     ◀─ Taken        (Get through NIXL: registered memory)
        Released ─▶                                     (Get under a lease: it is unused again)
        Go ─▶                           ◀─ blocks       (Put)
        Written ─▶
        Found ─▶                                        (Find)
        Released ─▶                                     (End)
        Reserved ─▶                                     (Reserve: a lease to write, for Put)
        Named ─▶                                        (Complete: the blocks put are readable)
"""

from msgspec import Struct

from worker_agent.blocks.descriptors import BlockDescriptorList
from worker_agent.blocks.names import BlockName

VERSION = 5
"""2: messages and blocks after the greeting have tags. 3: `Released` ends a `Get`; `Find`.
4: `Get` names what it expects; `End`. 5: `Reserve`, `Complete`."""


class Challenge(Struct, frozen=True, tag=True):
    """The server's nonce, for which a client has to prove that it knows the token."""

    worker_id: int
    nonce: bytes
    dp_rank: int = 0
    version: int = VERSION


class Proof(Struct, frozen=True, tag=True):
    """A client's proof that it knows the deployment's token; `nonce`: for the server's proof."""

    proof: bytes
    nonce: bytes
    version: int = VERSION


class Welcome(Struct, frozen=True, tag=True):
    """The server's acceptance of a client, with its proof that it knows the token too."""

    proof: bytes


class PeerRefused(Struct, frozen=True, tag=True):
    """A refused connection or request. The connection stays open after a refused request."""

    rule: str
    reason: str


class Get(Struct, frozen=True, tag=True):
    """A request for blocks under a lease.

    `may_map`: a client on this host that can map memory. `may_read`: a client that can read
    registered memory through NIXL. `identities`: the content that the client expects in the blocks;
    refused if it is another. Empty: any.
    """

    listed: BlockDescriptorList
    may_map: bool = False
    identities: list[bytes] = []
    may_read: bool = False


class GetNamed(Struct, frozen=True, tag=True):
    """A request for blocks by identity, from any set that has them."""

    identities: list[bytes]
    may_map: bool = False
    may_read: bool = False


class Put(Struct, frozen=True, tag=True):
    """A request to write blocks under a lease."""

    listed: BlockDescriptorList


class Sent(Struct, frozen=True, tag=True):
    """The header of the blocks that follow; `missing`: places of blocks that are not there."""

    missing: list[int]
    block_bytes: int


class Mapped(Struct, frozen=True, tag=True):
    """The location of blocks in memory that the client maps.

    The memory's file descriptor comes with the next byte, unless the client already has it. The
    blocks are held until the client sends `Taken`.
    """

    missing: list[int]
    block_bytes: int
    set_idx: int
    size_bytes: int
    """Size of the memory."""
    offsets: list[int]
    """Offset in the memory of each block that is not missing."""
    checks: dict[int, int]
    """Checksums of some of these blocks, by place; a sample suffices because memory rarely errs."""
    has_file: bool


class Readable(Struct, frozen=True, tag=True):
    """The location of blocks in memory that the client reads through NIXL.

    Each block's checksum and tag follow, without its bytes. The blocks are held until the client
    sends `Taken`.
    """

    missing: list[int]
    block_bytes: int
    addresses: list[int]
    """Address of each block that is not missing."""
    metadata: bytes
    """Of the owner's NIXL agent; empty if this connection has carried it already."""


class Taken(Struct, frozen=True, tag=True):
    """The client's confirmation that it has copied the blocks."""


class Released(Struct, frozen=True, tag=True):
    """The server's confirmation that it uses the lease of a `Get` no more."""


class Find(Struct, frozen=True, tag=True):
    """A question which of these blocks, by identity, any set has."""

    identities: list[bytes]


class End(Struct, frozen=True, tag=True):
    """The end of a lease: the client has read its blocks, or will write no more of them."""

    lease: str


class Found(Struct, frozen=True, tag=True):
    """The places in a `Find` of the blocks that are there; each may be gone a moment later."""

    places: list[int]


class Go(Struct, frozen=True, tag=True):
    """The server's permission to send the blocks."""

    block_bytes: int


class Written(Struct, frozen=True, tag=True):
    """The server's confirmation of written blocks; `corrupt`: places of damaged ones."""

    corrupt: list[int]


class Reserve(Struct, frozen=True, tag=True):
    """A request for a lease to write a prompt's blocks into the owner's host memory.

    `names`: of its leading blocks, in order. `fingerprint`: of the model that computes them.
    """

    names: list[BlockName]
    fingerprint: int


class Reserved(Struct, frozen=True, tag=True):
    """The owner's lease for the blocks at these places of a `Reserve`; None if there is none.

    `is_whole`: the owner has all other blocks; if not, it has no room for some.
    """

    places: list[int]
    listed: BlockDescriptorList | None
    is_whole: bool


class Complete(Struct, frozen=True, tag=True):
    """The end of a lease to write: all of its blocks that will be written are."""

    lease: str


class Named(Struct, frozen=True, tag=True):
    """The number of leading blocks of a completed lease that are readable by their names now."""

    blocks: int


Request = Get | GetNamed | Put | Find | End | Reserve | Complete
