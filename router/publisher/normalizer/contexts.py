"""The contexts that distinguish cached blocks beyond their tokens: LoRA, salt, and unknown keys.

Engines publish the context with some blocks only, so every block stores its context, and its
children inherit it. A context consists of three hashes: no names are kept, and long names cost no
more memory.
"""

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from xxhash import xxh3_64_intdigest

from router.protocol.values import U64_MAX, HashArray
from router.publisher.errors import NormalizerStateError
from router.sequence.hashing.block_hashes import HASH_SEED, hash_seed

PLAIN = 0
"""The context without LoRA and salt."""

UNTOLD = 1
"""The context of blocks beyond the limit on contexts; they match no request."""

_OPAQUE_SEED = 2
_RESERVED = 2
_MOST_RECENT = 1_024


class Context(Struct, frozen=True, array_like=True, gc=False):
    """The terms added to the seed of local hashes; 0: nothing."""

    lora: int = 0
    salt: int = 0
    opaque: int = 0

    @property
    def seed(self) -> int:
        """The seed of local hashes."""
        return (HASH_SEED + self.lora + self.salt + self.opaque) & U64_MAX


def opaque_hash(content: bytes) -> int:
    """Return the seed term of blocks with keys of unknown meaning."""
    return xxh3_64_intdigest(content, _OPAQUE_SEED)


class Contexts:
    """The contexts by number, up to a limit.

    Beyond the limit, the numbers of contexts without named blocks are reused. `uses[n]` is counted
    by the engine map.
    """

    __slots__ = ("_contexts", "_free", "_numbers", "_recent", "seeds", "uses")

    def __init__(self, limit: int) -> None:
        self.seeds: HashArray = np.zeros(limit + _RESERVED, np.uint64)
        self.uses: npt.NDArray[np.uint32] = np.zeros(limit + _RESERVED, np.uint32)
        self._set([Context(), Context(opaque=opaque_hash(b"untold"))])
        self._free: list[int] = []
        self._recent: dict[tuple[int, str | None, str | None, bytes | None], int] = {}

    def __len__(self) -> int:
        return len(self._contexts)

    def load(self, contexts: list[Context], uses: npt.NDArray[np.uint32]) -> None:
        """Replace all contexts by a list. Raises NormalizerStateError if there are too many."""
        if len(contexts) > len(self.seeds):
            raise NormalizerStateError(f"{len(contexts)} contexts (allowed: {len(self.seeds)})")
        self.uses[: len(uses)] = uses
        self._set(contexts)

    def _set(self, contexts: list[Context]) -> None:
        self._contexts = contexts
        self._numbers = {context: number for number, context in enumerate(contexts)}
        self.seeds[: len(contexts)] = [context.seed for context in contexts]

    def listed(self) -> list[Context]:
        """Return all contexts, by number."""
        return self._contexts

    def derived(
        self,
        parent: int,
        lora_name: str | None,
        cache_salt: str | None,
        opaque: bytes | None,
    ) -> int:
        """Return the number of a parent's context, changed by the fields of its child.

        Returns UNTOLD if the limit is reached. O(contexts) at worst.
        """
        if parent == UNTOLD:
            return UNTOLD
        told = (parent, lora_name, cache_salt, opaque)
        number = self._recent.get(told)
        if number is None:
            number = self._derive(*told)
            if len(self._recent) >= _MOST_RECENT:
                self._recent.clear()
            if number != UNTOLD:
                self._recent[told] = number
        return number

    def _derive(
        self, parent: int, lora_name: str | None, cache_salt: str | None, opaque: bytes | None
    ) -> int:
        inherited = self._contexts[parent]
        context = Context(
            _term(lora_name, None) or inherited.lora,
            _term(None, cache_salt) or inherited.salt,
            opaque_hash(opaque) if opaque else inherited.opaque,
        )
        number = self._numbers.get(context)
        return self._number(context) if number is None else number

    def _number(self, context: Context) -> int:
        if len(self._contexts) < len(self.seeds):
            number = len(self._contexts)
            self._contexts.append(context)
        else:
            number = self._unused()
            if number == UNTOLD:
                return UNTOLD
            del self._numbers[self._contexts[number]]
            self._recent.clear()
            self._contexts[number] = context
        self._numbers[context] = number
        self.seeds[number] = context.seed
        return number

    def _unused(self) -> int:
        """Return a number that no named block uses, or UNTOLD if there is none."""
        if not self._free:
            self._free = (np.flatnonzero(self.uses[_RESERVED:] == 0) + _RESERVED).tolist()
        while self._free:
            number = self._free.pop()
            if not self.uses[number]:
                return number
        return UNTOLD


def _term(lora_name: str | None, cache_salt: str | None) -> int:
    return (hash_seed(lora_name, cache_salt) - HASH_SEED) & U64_MAX
