"""The tokens of a request as a sequence of blocks; each block is hashed as soon as it is full.

    append, extend ──▶ PartialTokenBlock ──full──▶ TokenBlock, TokenBlock, …
                            ▲                              │
                            └─── truncate, unwind, pop ────┘

The partial block of a sequence is never full. Operations and results are those of Dynamo's
`lib/tokens`.

There are two hash schemes in the field. Both include a request's LoRA and salt.

| family | block hash, seed    | sequence hash, seed | used by                               |
|--------|---------------------|---------------------|---------------------------------------|
| routed | 1337 + LoRA + salt  | 1337                | the bus, the index, our pools         |
| salted | salt hash           | salt hash           | Dynamo's block manager (`lib/tokens`) |
"""

from collections.abc import Iterable, Sequence
from itertools import chain

import msgspec
from msgspec import Struct
from xxhash import xxh3_64_intdigest

from router.errors import InvalidFieldError, KvRouterError
from router.protocol.values import U32_MAX
from router.sequence.hashing.block_hashes import (
    HASH_SEED,
    chain_hash,
    hash_seed,
    local_block_hash,
    token_array,
)


class TokenBlockError(KvRouterError):
    """An operation that a block of tokens does not allow; the block is unchanged."""

    code = "token_block"


class TokenBlockFullError(TokenBlockError):
    """A token for a block that is full."""

    code = "token_block_full"

    def __init__(self, block_size: int) -> None:
        super().__init__(f"token: the block is full (allowed: {block_size} tokens)")
        self.block_size = block_size


class TokenBlockIncompleteError(TokenBlockError):
    """A commit of a block that is not full."""

    code = "token_block_incomplete"

    def __init__(self, tokens: int, block_size: int) -> None:
        super().__init__(f"block: it has {tokens} tokens (allowed: {block_size})")
        self.tokens = tokens
        self.block_size = block_size


class TokenBlockEmptyError(TokenBlockError):
    """A removal of a token from an empty block."""

    code = "token_block_empty"

    def __init__(self) -> None:
        super().__init__("block: it is empty (allowed: at least one token)")


class InsufficientTokensError(TokenBlockError):
    """A removal of more tokens than there are."""

    code = "insufficient_tokens"

    def __init__(self, wanted: int, tokens: int) -> None:
        super().__init__(f"tokens: {wanted} requested (allowed: at most {tokens})")
        self.wanted = wanted
        self.tokens = tokens


class BlockHashes(Struct, frozen=True):
    """The hashes of a full block in one family. For a first block the two hashes are equal."""

    block_hash: int
    sequence_hash: int
    parent_sequence_hash: int | None


class BlockFamily(Struct, frozen=True):
    """A hash scheme: the seed of a block's content, and the seed of the step from its parent."""

    block_seed: int
    chain_seed: int

    def names(self, tokens: Sequence[int], parent_sequence_hash: int | None) -> BlockHashes:
        """Return the hashes of a full block after its parent. O(tokens)."""
        block_hash = local_block_hash(token_array(tokens), self.block_seed)
        sequence_hash = chain_hash(parent_sequence_hash, block_hash, self.chain_seed)
        return BlockHashes(block_hash, sequence_hash, parent_sequence_hash)


class Families(Struct, frozen=True):
    """The two hash schemes of the blocks of one request."""

    routed: BlockFamily
    salted: BlockFamily


def request_families(lora_name: str | None = None, cache_salt: str | None = None) -> Families:
    """Return the hash schemes of the blocks of a request with this LoRA and salt."""
    return Families(
        BlockFamily(hash_seed(lora_name, cache_salt), HASH_SEED),
        salted_family(salt_hash(lora_name, cache_salt)),
    )


def salted_family(salt_hash: int) -> BlockFamily:
    """Return the scheme of Dynamo's block manager under a salt."""
    return BlockFamily(salt_hash, salt_hash)


def salt_hash(lora_name: str | None = None, cache_salt: str | None = None) -> int:
    """Return Dynamo's salt of a request: the hash of its fields that are set.

    The fields are encoded as compact JSON, salt first.
    """
    fields = {"salt": cache_salt, "lora_name": lora_name}
    present = {key: value for key, value in fields.items() if value is not None}
    return xxh3_64_intdigest(msgspec.json.encode(present), 0)


class TokenBlock(Struct, frozen=True):
    """A full block of a sequence; `position` is the number of blocks before it."""

    tokens: tuple[int, ...]
    position: int
    routed: BlockHashes
    salted: BlockHashes
    families: Families


class PartialTokenBlock:
    """An incomplete block, after `parent`."""

    __slots__ = ("_families", "_parent", "_tokens", "block_size")

    def __init__(
        self,
        block_size: int,
        families: Families,
        parent: TokenBlock | None = None,
        tokens: Iterable[int] = (),
    ) -> None:
        self.block_size = block_size
        self._families = families
        self._parent = parent
        self._tokens = list(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens in the block, in order."""
        return tuple(self._tokens)

    @property
    def remaining(self) -> int:
        """The number of tokens until the block is full."""
        return self.block_size - len(self._tokens)

    @property
    def position(self) -> int:
        """The number of blocks before it."""
        return 0 if self._parent is None else self._parent.position + 1

    def push(self, token: int) -> None:
        """Add a token.

        Raises TokenBlockFullError, or InvalidFieldError for a token that is no u32.
        """
        if not self.remaining:
            raise TokenBlockFullError(self.block_size)
        _refuse_odd_tokens((token,))
        self._tokens.append(token)

    def push_all(self, tokens: Sequence[int]) -> Sequence[int]:
        """Add as many tokens as fit; return the others. Raises InvalidFieldError, adding none."""
        _refuse_odd_tokens(tokens)
        room = self.remaining
        self._tokens += tokens[:room]
        return tokens[room:]

    def pop(self) -> int:
        """Remove and return the last token. Raises TokenBlockEmptyError."""
        if not self._tokens:
            raise TokenBlockEmptyError
        return self._tokens.pop()

    def commit(self) -> TokenBlock:
        """Return this block as a full block, and become the empty block after it.

        Raises TokenBlockIncompleteError.
        """
        if self.remaining:
            raise TokenBlockIncompleteError(len(self._tokens), self.block_size)
        self._parent = block = self._named()
        self._tokens.clear()
        return block

    def _named(self) -> TokenBlock:
        parent, families = self._parent, self._families
        routed = None if parent is None else parent.routed.sequence_hash
        salted = None if parent is None else parent.salted.sequence_hash
        return TokenBlock(
            tuple(self._tokens),
            self.position,
            families.routed.names(self._tokens, routed),
            families.salted.names(self._tokens, salted),
            families,
        )


class TokenBlockSequence:
    """All tokens of a request: full blocks and a partial one.

    Invariants: 0 ≤ tokens in the partial block < block_size; the hashes depend only on the tokens,
    not on the operations that added them.
    """

    __slots__ = ("_blocks", "_partial", "block_size", "families")

    def __init__(self, tokens: Sequence[int], block_size: int, families: Families) -> None:
        """Create a sequence of these tokens. Raises InvalidFieldError."""
        if block_size < 1:
            raise InvalidFieldError("block_size", f"{block_size}", "at least 1 token")
        self.block_size = block_size
        self.families = families
        self._blocks: list[TokenBlock] = []
        self._partial = PartialTokenBlock(block_size, families)
        self.extend(tokens)

    def __len__(self) -> int:
        """Return the total number of tokens."""
        return len(self._blocks) * self.block_size + len(self._partial)

    @property
    def blocks(self) -> Sequence[TokenBlock]:
        """The full blocks, in order; read-only."""
        return self._blocks

    @property
    def last_block(self) -> TokenBlock | None:
        """The last full block, or None."""
        return self._blocks[-1] if self._blocks else None

    def append(self, token: int) -> int | None:
        """Add a token; return the index of the block that it fills, or None.

        Raises InvalidFieldError.
        """
        self._partial.push(token)
        return None if self._partial.remaining else self._commit()

    def extend(self, tokens: Sequence[int]) -> range:
        """Add tokens; return the indices of the blocks that they fill. O(tokens).

        Raises InvalidFieldError, adding none.
        """
        _refuse_odd_tokens(tokens)
        first = len(self._blocks)
        for token_run in _runs(tokens, self._partial.remaining, self.block_size):
            self._partial.push_all(token_run)
            if not self._partial.remaining:
                self._commit()
        return range(first, len(self._blocks))

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, or all if there are fewer. O(blocks dropped).

        Raises InvalidFieldError for a length below 0.
        """
        if length < 0:
            raise InvalidFieldError("length", f"{length}", "0 tokens or more")
        if length >= len(self):
            return
        full, kept = divmod(length, self.block_size)
        cut = self._blocks[full].tokens if full < len(self._blocks) else self._partial.tokens
        del self._blocks[full:]
        self._partial = PartialTokenBlock(
            self.block_size, self.families, self.last_block, cut[:kept]
        )

    def unwind(self, count: int) -> None:
        """Remove the last `count` tokens. Raises InsufficientTokensError, removing none."""
        if not 0 <= count <= len(self):
            raise InsufficientTokensError(count, len(self))
        self.truncate(len(self) - count)

    def pop(self) -> int | None:
        """Remove and return the last token. Returns None if there is none."""
        if not len(self):
            return None
        [token] = self.tokens_at(len(self) - 1, len(self))
        self.unwind(1)
        return token

    def reset(self) -> None:
        """Remove all tokens."""
        self.truncate(0)

    def tokens_at(self, start: int, end: int) -> list[int]:
        """Return the tokens of a range; none if it exceeds the sequence."""
        if not 0 <= start <= end <= len(self):
            return []
        first = start // self.block_size
        blocks = self._blocks[first : -(-end // self.block_size)]
        tokens = chain(*(block.tokens for block in blocks), self._partial.tokens)
        return list(tokens)[start - first * self.block_size : end - first * self.block_size]

    def _commit(self) -> int:
        self._blocks.append(self._partial.commit())
        return len(self._blocks) - 1


def _runs(tokens: Sequence[int], first: int, size: int) -> Iterable[Sequence[int]]:
    """Split tokens after the first `first`, then after every `size` more."""
    yield tokens[:first]
    for start in range(first, len(tokens), size):
        yield tokens[start : start + size]


def _refuse_odd_tokens(tokens: Sequence[int]) -> None:
    if tokens and not 0 <= min(tokens) <= max(tokens) <= U32_MAX:
        odd = next(token for token in tokens if not 0 <= token <= U32_MAX)
        raise InvalidFieldError("tokens", f"{odd}", "token ids from 0 to 2^32 - 1")
