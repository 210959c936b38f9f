"""The transitions of a slot: a closed table of state and act.

The README shows it. Source: the slots of Dynamo's connectors; cases that they leave open are
decided here.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from msgspec import Struct


class SlotState(StrEnum):
    """State of a request, as the connector sees it."""

    INITIALIZED = "Initialized"
    """No token was computed, or all that were are gone (preemption)."""
    NOT_SCHEDULED = "NotScheduled"
    """The engine left it out of an iteration."""
    ONBOARD_STAGED = "OnboardStaged"
    """Blocks of its prompt are held in lower tiers, to be loaded."""
    ONBOARDING = "Onboarding"
    """The staged blocks are being loaded."""
    PREFILLING = "Prefilling"
    DECODING = "Decoding"
    FINISHING = "Finishing"
    """The engine has finished it; blocks of it are still being moved."""
    FINISHED = "Finished"


class Act(StrEnum):
    """An operation on a slot."""

    SCHEDULED = "scheduled"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ACQUIRE = "acquire"
    ONBOARDING = "onboarding"
    NOT_SCHEDULED = "not_scheduled"
    FINISHED = "finished"
    PREEMPT = "preempt"
    ADVANCE = "advance"
    APPEND = "append"


class Guard(StrEnum):
    """Condition of a cell, beside state and act."""

    NONE = ""
    MATCHED = "if blocks match"
    """Otherwise the slot stays as it is."""
    LOADED = "once loads are done"
    """Otherwise the operation is refused with InvalidState."""
    PROMPT_COMPUTED = "if the prompt is computed"
    """Otherwise the operation is refused with InvalidState."""
    SETTLED = "once nothing moves"
    """Until then the slot is Finishing."""


class InvalidTransition(StrEnum):
    """Reason of a refusal: the wrong state, or an invalid operation."""

    NONE = ""
    STATE = "InvalidState"
    OPERATION = "InvalidOperation"


class Cell(Struct, frozen=True):
    """The effect of an act on a slot. `to`: the next state; None if it does not change."""

    to: SlotState | None = None
    guard: Guard = Guard.NONE
    refusal: InvalidTransition = InvalidTransition.NONE

    def __str__(self) -> str:
        return f"{self.refusal or self.to or 'stay'} {self.guard}".strip()


_STAY = Cell()
_STATE = Cell(refusal=InvalidTransition.STATE)
_OPERATION = Cell(refusal=InvalidTransition.OPERATION)
_RESET = Cell(SlotState.INITIALIZED)
_SKIP = Cell(SlotState.NOT_SCHEDULED)
_PREFILL = Cell(SlotState.PREFILLING)
_DECODE = Cell(SlotState.DECODING)
_END = Cell(SlotState.FINISHED, Guard.SETTLED)

_ROWS = {
    SlotState.INITIALIZED: {
        Act.SCHEDULED: _STAY,
        Act.PREFILLING: _PREFILL,
        Act.DECODING: Cell(SlotState.DECODING, Guard.PROMPT_COMPUTED),
        Act.ACQUIRE: Cell(SlotState.ONBOARD_STAGED, Guard.MATCHED),
        Act.ONBOARDING: _OPERATION,
        Act.NOT_SCHEDULED: _STAY,
        Act.FINISHED: _END,
        Act.PREEMPT: _STAY,
        Act.ADVANCE: _STAY,
        Act.APPEND: _STAY,
    },
    SlotState.NOT_SCHEDULED: {
        Act.SCHEDULED: _STAY,
        Act.PREFILLING: _PREFILL,
        Act.DECODING: _DECODE,
        Act.ACQUIRE: _OPERATION,
        Act.ONBOARDING: _OPERATION,
        Act.NOT_SCHEDULED: _STAY,
        Act.FINISHED: _END,
        Act.PREEMPT: _RESET,
        Act.ADVANCE: _STAY,
        Act.APPEND: _STAY,
    },
    SlotState.ONBOARD_STAGED: {
        Act.SCHEDULED: _STAY,
        Act.PREFILLING: _PREFILL,
        Act.DECODING: _STATE,
        Act.ACQUIRE: _STAY,
        Act.ONBOARDING: Cell(SlotState.ONBOARDING),
        Act.NOT_SCHEDULED: _STAY,
        Act.FINISHED: _END,
        Act.PREEMPT: _RESET,
        Act.ADVANCE: _STATE,
        Act.APPEND: _STAY,
    },
    SlotState.ONBOARDING: {
        Act.SCHEDULED: Cell(guard=Guard.LOADED),
        Act.PREFILLING: Cell(SlotState.PREFILLING, Guard.LOADED),
        Act.DECODING: _STATE,
        Act.ACQUIRE: _OPERATION,
        Act.ONBOARDING: _STATE,
        Act.NOT_SCHEDULED: _STAY,
        Act.FINISHED: _END,
        Act.PREEMPT: Cell(SlotState.INITIALIZED, Guard.LOADED),
        Act.ADVANCE: _STAY,
        Act.APPEND: _STAY,
    },
    SlotState.PREFILLING: {
        Act.SCHEDULED: _STAY,
        Act.PREFILLING: _STAY,
        Act.DECODING: _DECODE,
        Act.ACQUIRE: _OPERATION,
        Act.ONBOARDING: _OPERATION,
        Act.NOT_SCHEDULED: _SKIP,
        Act.FINISHED: _END,
        Act.PREEMPT: _RESET,
        Act.ADVANCE: _STAY,
        Act.APPEND: _STAY,
    },
    SlotState.DECODING: {
        Act.SCHEDULED: _STAY,
        Act.PREFILLING: _STATE,
        Act.DECODING: _STAY,
        Act.ACQUIRE: _OPERATION,
        Act.ONBOARDING: _OPERATION,
        Act.NOT_SCHEDULED: _SKIP,
        Act.FINISHED: _END,
        Act.PREEMPT: _RESET,
        Act.ADVANCE: _STAY,
        Act.APPEND: _STAY,
    },
    SlotState.FINISHING: {
        **dict.fromkeys(Act, _STATE),
        Act.FINISHED: _END,
    },
    SlotState.FINISHED: {
        **dict.fromkeys(Act, _STATE),
        Act.FINISHED: _STAY,
    },
}

TRANSITIONS: Mapping[SlotState, Mapping[Act, Cell]] = MappingProxyType(
    {state: MappingProxyType(row) for state, row in _ROWS.items()}
)
"""The effect of every act in every state."""
