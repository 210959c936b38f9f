"""Memory of other workers on this host, mapped to be read."""

import mmap
import os
from collections.abc import Iterator, Sequence

from xxhash import xxh3_64_intdigest

from router.blockset_errors import PeerError
from worker_agent.transfer.peer_messages import Mapped, Taken
from worker_agent.transfer.peer_wire import Line


class MappedMemory:
    """What one connection was handed over, by the set whose blocks lie there."""

    __slots__ = ("_maps",)

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}

    def taken(self, line: Line, sent: Mapped, room: Sequence[memoryview]) -> Iterator[bool]:
        """Blocks to where they belong, and whether each is right, as far as it was checked.

        Raises PeerError, also for memory that is not what was said.
        """
        if sent.has_file:
            self._map(line, sent)
        memory = self._maps.get(sent.set_idx)
        if memory is None or len(sent.offsets) < len(room):
            raise PeerError(line.address, f"blocks of set {sent.set_idx} are nowhere")
        with memoryview(memory) as whole:
            for place, (offset, view) in enumerate(zip(sent.offsets, room, strict=False)):
                if not 0 <= offset <= len(whole) - sent.block_bytes:
                    raise PeerError(line.address, f"a block at {offset} of {len(whole)}")
                view[:] = whole[offset : offset + sent.block_bytes]
                check = sent.checks.get(place)
                yield check is None or check == xxh3_64_intdigest(view)
        line.send(Taken())

    def close(self) -> None:
        """Let go of all of it."""
        for memory in self._maps.values():
            memory.close()
        self._maps.clear()

    def _map(self, line: Line, sent: Mapped) -> None:
        descriptor = line.receive_file()
        try:
            memory = mmap.mmap(descriptor, sent.size_bytes, prot=mmap.PROT_READ)
        except (OSError, ValueError, OverflowError) as error:
            raise PeerError(line.address, str(error)) from error
        finally:
            os.close(descriptor)
        former = self._maps.pop(sent.set_idx, None)
        if former is not None:
            former.close()
        self._maps[sent.set_idx] = memory
