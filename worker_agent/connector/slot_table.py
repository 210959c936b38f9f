"""What may be done to a slot in which state, and what becomes of it: a closed table.

The README shows it. Source: the slots of Dynamo's connectors; what they leave open is decided here.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from msgspec import Struct


class SlotState(StrEnum):
    """How far a request is, as the connector sees it."""

    INITIALIZED = "Initialized"
    """Nothing was computed for it, or all that was is gone (preemption)."""
    NOT_SCHEDULED = "NotScheduled"
    """The engine left it out of an iteration."""
    ONBOARD_STAGED = "OnboardStaged"
    """Blocks of its prompt are held in lower tiers, to be loaded."""
    ONBOARDING = "Onboarding"
    """They are being loaded."""
    PREFILLING = "Prefilling"
    DECODING = "Decoding"
    FINISHING = "Finishing"
    """The engine is done with it; blocks of its are still being moved."""
    FINISHED = "Finished"


class Act(StrEnum):
    """What may be done to a slot."""

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
    """What a cell depends on, beside state and act."""

    NONE = ""
    MATCHED = "if blocks match"
    """Otherwise the slot stays as it is."""
    LOADED = "once loads are done"
    """Otherwise the state is refused."""
    PROMPT_COMPUTED = "if the prompt is computed"
    """Otherwise the state is refused."""
    SETTLED = "once nothing moves"
    """Until then: Finishing."""


class Refusal(StrEnum):
    """What is wrong: the moment, or the act."""

    NONE = ""
    STATE = "InvalidState"
    OPERATION = "InvalidOperation"


class Cell(Struct, frozen=True):
    """What an act makes of a slot. `to`: None if it stays as it is."""

    to: SlotState | None = None
    guard: Guard = Guard.NONE
    refusal: Refusal = Refusal.NONE

    def __str__(self) -> str:
        return f"{self.refusal or self.to or 'stay'} {self.guard}".strip()


_STAY = Cell()
_STATE = Cell(refusal=Refusal.STATE)
_OPERATION = Cell(refusal=Refusal.OPERATION)
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
"""Every act in every state."""
