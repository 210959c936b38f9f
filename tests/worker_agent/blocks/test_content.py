"""Every operation in every state: what the table says, and what the block does."""

from itertools import product

import pytest

from router.block_errors import (
    BlockStateError,
    InsufficientTokensError,
    TokenBlockEmptyError,
    TokenBlockFullError,
    TokenBlockIncompleteError,
)
from router.errors import InvalidFieldError
from router.sequence.block_families import request_families
from router.sequence.tokens import TokenBlockSequence
from worker_agent.blocks.content import TRANSITIONS, BlockContent, BlockState, Operation

FAMILIES = request_families()
[TOKEN_BLOCK, NEXT_BLOCK] = TokenBlockSequence([1, 2, 3, 4], 2, FAMILIES).blocks

EXPECTED = {
    "reset": {"init_sequence": "partial", "apply_token_block": "complete", "reset": "reset"},
    "partial": {
        "add_tokens": "partial",
        "pop_tokens": "partial",
        "commit": "complete",
        "reset": "reset",
    },
    "complete": {"register": "registered", "reset": "reset"},
    "registered": {"reset": "reset"},
}
"""As the reference has it."""

OPERATIONS = {
    Operation.INIT_SEQUENCE: lambda content: content.init_sequence(FAMILIES),
    Operation.ADD_TOKENS: lambda content: content.add_tokens([]),
    Operation.POP_TOKENS: lambda content: content.pop_tokens(0),
    Operation.COMMIT: BlockContent.commit,
    Operation.APPLY_TOKEN_BLOCK: lambda content: content.apply_token_block(TOKEN_BLOCK),
    Operation.REGISTER: BlockContent.register,
    Operation.RESET: BlockContent.reset,
}


def content(state):
    """A block of two tokens in this state; a partial one is full."""
    of = BlockContent(7, 2)
    if state is not BlockState.RESET:
        of.init_sequence(FAMILIES)
        of.add_tokens([1, 2])
    if state in {BlockState.COMPLETE, BlockState.REGISTERED}:
        of.commit()
    if state is BlockState.REGISTERED:
        of.register()
    assert of.state is state
    return of


@pytest.mark.parametrize(("state", "operation"), list(product(BlockState, Operation)), ids=str)
def test_each_operation_in_each_state(state, operation):
    of, expected = content(state), EXPECTED[state].get(operation)
    assert TRANSITIONS.get((state, operation)) == expected
    if expected is None:
        with pytest.raises(BlockStateError, match=f"block: 7 is {state} .*{operation}: "):
            OPERATIONS[operation](of)
        assert of.state is state
    else:
        OPERATIONS[operation](of)
        assert of.state == expected


def test_is_filled_token_by_token():
    of = content(BlockState.RESET)
    of.init_sequence(FAMILIES, TOKEN_BLOCK)
    of.add_token(3)
    with pytest.raises(TokenBlockIncompleteError):
        of.commit()
    assert of.add_tokens([9, 10]) == [10]
    with pytest.raises(TokenBlockFullError):
        of.add_token(4)
    assert of.pop_token() == 9
    with pytest.raises(InsufficientTokensError):
        of.pop_tokens(2)
    of.add_token(4)
    assert of.commit() == of.token_block == NEXT_BLOCK
    assert len(of) == 2


def test_has_a_hash_only_when_complete():
    for state in (BlockState.RESET, BlockState.PARTIAL):
        with pytest.raises(BlockStateError, match="complete or registered"):
            _ = content(state).token_block
    for state in (BlockState.COMPLETE, BlockState.REGISTERED):
        assert content(state).token_block == TOKEN_BLOCK


def test_reset_leaves_nothing():
    of = content(BlockState.REGISTERED)
    of.reset()
    assert len(of) == 0
    of.init_sequence(FAMILIES)
    with pytest.raises(TokenBlockEmptyError):
        of.pop_token()


def test_a_token_block_of_another_size_is_refused():
    of = BlockContent(7, 4)
    with pytest.raises(InvalidFieldError, match=r"token_block: 2 tokens \(allowed: 4 tokens\)"):
        of.apply_token_block(TOKEN_BLOCK)
    assert of.state is BlockState.RESET
