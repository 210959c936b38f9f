"""Hashes that a caller knows instead of tokens: what they must be to be believed."""

from collections.abc import Sequence

import numpy as np

from router.errors import InvalidFieldError
from router.protocol.requests import PromptRequest
from router.protocol.values import U32_MAX, U64_MAX, HashArray, Identity

MAX_PROMPT_TOKENS = 4_000_000
"""More than any model reads; every token beyond would only hold up other requests."""

NO_HASHES: HashArray = np.empty(0, np.uint64)


def hash_array(hashes: Sequence[int]) -> HashArray:
    """Hashes as callers write them, signed or not, as u64. O(hashes)."""
    return np.array([each & U64_MAX for each in hashes], np.uint64)


def full_blocks(isl_tokens: int, identity: Identity) -> int:
    """Blocks of a prompt that have a name under this identity."""
    return max(isl_tokens - identity.eagle, 0) // identity.block_size


def check_length(field: str, length: int) -> None:
    """Raises InvalidFieldError for a prompt that nobody reads."""
    if length > MAX_PROMPT_TOKENS:
        reason, allowed = f"{length} tokens", f"at most {MAX_PROMPT_TOKENS}"
        raise InvalidFieldError(field, reason, allowed, status=413)


def check_hashes(request: PromptRequest, identities: Sequence[Identity]) -> None:
    """Whether the hashes of a request without tokens can be true under one of these identities.

    Raises InvalidFieldError.
    """
    blocks, hashes, isl_tokens = request.block_hashes, request.sequence_hashes, request.isl_tokens
    if blocks is None and hashes is None:
        allowed = f"a list of integers, 0 to {U32_MAX}; or sequence_hashes and isl_tokens"
        raise InvalidFieldError(request.tokens_field, "missing", allowed)
    if hashes is None:
        allowed = "one for each of block_hashes; or token_ids instead of both"
        raise InvalidFieldError("sequence_hashes", "missing beside block_hashes", allowed)
    if isl_tokens is None:
        reason = "missing; sequence_hashes do not say it"
        raise InvalidFieldError("isl_tokens", reason, "the prompt's length in tokens")
    check_length("isl_tokens", isl_tokens)
    check_length("sequence_hashes", len(hashes))
    _check_range("sequence_hashes", hashes)
    if blocks is not None:
        _check_range("block_hashes", blocks)
        if len(blocks) != len(hashes):
            reason = f"{len(blocks)} beside {len(hashes)} sequence_hashes"
            raise InvalidFieldError("block_hashes", reason, "as many as sequence_hashes")
    _check_count(len(hashes), isl_tokens, identities)


def _check_range(field: str, hashes: Sequence[int]) -> None:
    if max(hashes, default=0) > U64_MAX:
        allowed = f"{-(2**63)} to {U64_MAX}"
        raise InvalidFieldError(field, "too large", allowed, status=422)


def _check_count(blocks: int, isl_tokens: int, identities: Sequence[Identity]) -> None:
    """Hashes of blocks of another size would be searched for in vain, and be booked as load."""
    fitting = {each: full_blocks(isl_tokens, each) for each in identities}
    if fitting and blocks not in fitting.values():
        sizes = sorted({each.block_size for each in identities})
        of_size = " or ".join(map(str, sizes))
        reason = f"{blocks} for {isl_tokens} tokens, where blocks have {of_size} tokens"
        allowed = " or ".join(map(str, sorted(set(fitting.values()))))
        raise InvalidFieldError("sequence_hashes", reason, allowed)
