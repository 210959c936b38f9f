"""What two workers say to each other about blocks, over a socket.

server  Challenge ─▶                    ◀─ Proof        client
        Welcome (its proof), or Refused ─▶
                                        ◀─ Get, GetNamed, or Put
        Sent, then blocks ─▶  (Get)
        or Mapped, a file ─▶            ◀─ Taken        (Get on one host: shared memory)
        Go ─▶                           ◀─ blocks       (Put)
        Written ─▶
"""

from msgspec import Struct

from worker_agent.blockset import BlockDescriptorList

VERSION = 1


class Challenge(Struct, frozen=True, tag=True):
    """What a client has to prove its token with."""

    worker_id: int
    nonce: bytes
    version: int = VERSION


class Proof(Struct, frozen=True, tag=True):
    """A client knows the token of the deployment; `nonce`: what the server proves it with."""

    proof: bytes
    nonce: bytes
    version: int = VERSION


class Welcome(Struct, frozen=True, tag=True):
    """It may ask; and the server knows the token, too."""

    proof: bytes


class Refused(Struct, frozen=True, tag=True):
    """It may not, or not this. The connection goes on after a request that was refused."""

    rule: str
    reason: str


class Get(Struct, frozen=True, tag=True):
    """Blocks under a lease. `may_map`: the client is on this host, and reads memory by itself."""

    listed: BlockDescriptorList
    may_map: bool = False


class GetNamed(Struct, frozen=True, tag=True):
    """Blocks by what they hold, of whichever set has them."""

    identities: list[bytes]
    may_map: bool = False


class Put(Struct, frozen=True, tag=True):
    """Blocks to be written under a lease."""

    listed: BlockDescriptorList


class Sent(Struct, frozen=True, tag=True):
    """Blocks follow, but for those that are not there."""

    missing: list[int]
    block_bytes: int


class Mapped(Struct, frozen=True, tag=True):
    """Blocks lie in memory that the client maps: whose file comes with the next byte, unless it
    came before. They stay until it says that it has them.
    """

    missing: list[int]
    block_bytes: int
    set_idx: int
    size_bytes: int
    """Of the memory."""
    offsets: list[int]
    """Where in it each block begins that is not missing."""
    checks: dict[int, int]
    """Checksums of some of those: memory seldom errs."""
    has_file: bool


class Taken(Struct, frozen=True, tag=True):
    """The client has the blocks."""


class Go(Struct, frozen=True, tag=True):
    """The blocks may come."""

    block_bytes: int


class Written(Struct, frozen=True, tag=True):
    """Blocks were written, but for those that came damaged."""

    corrupt: list[int]


Request = Get | GetNamed | Put
