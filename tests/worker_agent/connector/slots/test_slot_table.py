"""Every act in every state: what the table says, and what a slot does."""

from itertools import product
from pathlib import Path

import pytest

from support.blocks.connectors import (
    in_state,
    keep,
    lower_tiers,
    manager_over,
    names_of,
    settle_all,
)
from worker_agent import connector
from worker_agent.connector.slots.errors import SlotOperationError, SlotStateError
from worker_agent.connector.slots.protocol import Completion
from worker_agent.connector.slots.slot_table import (
    TRANSITIONS,
    Act,
    Guard,
    InvalidTransition,
    SlotState,
)

EXPECTED = """
              | scheduled    | prefilling      | decoding        | acquire          | onboarding   | not_scheduled | finished
Initialized   | stay         | Prefilling      | Decoding ?      | OnboardStaged ?  | InvalidOp    | stay          | Finished ?
NotScheduled  | stay         | Prefilling      | Decoding        | InvalidOp        | InvalidOp    | stay          | Finished ?
OnboardStaged | stay         | Prefilling      | InvalidState    | stay             | Onboarding   | stay          | Finished ?
Onboarding    | stay ?       | Prefilling ?    | InvalidState    | InvalidOp        | InvalidState | stay          | Finished ?
Prefilling    | stay         | stay            | Decoding        | InvalidOp        | InvalidOp    | NotScheduled  | Finished ?
Decoding      | stay         | InvalidState    | stay            | InvalidOp        | InvalidOp    | NotScheduled  | Finished ?
Finishing     | InvalidState | InvalidState    | InvalidState    | InvalidState     | InvalidState | InvalidState  | Finished ?
Finished      | InvalidState | InvalidState    | InvalidState    | InvalidState     | InvalidState | InvalidState  | stay
"""  # noqa: E501
"""As the reference has it; with a question mark, if something more holds."""

EXPECTED_MORE = """
              | preempt      | advance      | append
Initialized   | stay         | stay         | stay
NotScheduled  | Initialized  | stay         | stay
OnboardStaged | Initialized  | InvalidState | stay
Onboarding    | Initialized ?| stay         | stay
Prefilling    | Initialized  | stay         | stay
Decoding      | Initialized  | stay         | stay
Finishing     | InvalidState | InvalidState | InvalidState
Finished      | InvalidState | InvalidState | InvalidState
"""

ACTS = {
    Act.SCHEDULED: lambda slot: slot.mark_as_scheduled(5),
    Act.PREFILLING: lambda slot: slot.mark_as_prefilling(5),
    Act.DECODING: lambda slot: slot.mark_as_decoding(5),
    Act.ACQUIRE: lambda slot: slot.acquire_all_local_matches(0),
    Act.ONBOARDING: lambda slot: slot.mark_as_onboarding(5, 1.0),
    Act.NOT_SCHEDULED: lambda slot: slot.mark_as_not_scheduled(5),
    Act.FINISHED: lambda slot: slot.mark_as_finished(5, 1.0),
    Act.PREEMPT: lambda slot: slot.preempt(5),
    Act.ADVANCE: lambda slot: slot.advance_computed_position(1),
    Act.APPEND: lambda slot: slot.append_mutable_device_blocks([[99]]),
}
WHERE_GUARDS_HOLD = {
    Guard.LOADED: settle_all,
    Guard.PROMPT_COMPUTED: lambda slot: slot.advance_computed_position(10),
    Guard.SETTLED: settle_all,
}
CELLS = list(product(SlotState, Act))


def parsed(text):
    head, *rows = [[cell.strip() for cell in line.split("|")] for line in text.split("\n")[1:-1]]
    return {
        (row[0], act): cell for row in rows for act, cell in zip(head[1:], row[1:], strict=True)
    }


def compared(cell):
    """A cell of the table as the expected ones are written."""
    first = (
        "InvalidOp"
        if cell.refusal is InvalidTransition.OPERATION
        else cell.refusal or cell.to or "stay"
    )
    return f"{first} ?" if cell.guard else str(first)


def stocked():
    """Slots over tiers that have the prompt."""
    tiers = lower_tiers()
    keep(tiers[0].pool, names_of(range(1, 11)))
    return manager_over(tiers), tiers


def used_blocks(tiers):
    return sum(source.pool.used_blocks for source in tiers)


def test_the_table_is_the_reference_s():
    table = {
        (state, act): compared(cell)
        for state, row in TRANSITIONS.items()
        for act, cell in row.items()
    }
    expected = parsed(EXPECTED) | parsed(EXPECTED_MORE)
    assert table == {k: " ".join(v.replace("?", " ?").split()) for k, v in expected.items()}


@pytest.mark.parametrize(("state", "act"), CELLS, ids=str)
def test_each_act_in_each_state(state, act):
    manager, tiers = stocked()
    slot, cell = in_state(manager, state), TRANSITIONS[state][act]
    if cell.refusal:
        refused(
            slot,
            act,
            SlotStateError if cell.refusal is InvalidTransition.STATE else SlotOperationError,
        )
    else:
        if cell.guard in {Guard.LOADED, Guard.PROMPT_COMPUTED}:
            refused(slot, act, SlotStateError)
        if cell.guard in WHERE_GUARDS_HOLD:
            WHERE_GUARDS_HOLD[cell.guard](slot)
        ACTS[act](slot)
        assert slot.state is (cell.to or state)
    manager.remove_slot("r", is_forced=True)
    assert used_blocks(tiers) == 0


@pytest.mark.parametrize("state", SlotState, ids=str)
def test_from_each_state_a_slot_is_finished_by_the_deadline(state):
    """Whatever the worker never says; what it may still be doing is in quarantine until it does."""
    manager, tiers = stocked()
    slot = in_state(manager, state)
    slot.mark_as_finished(5, 100.0)
    slot.mark_as_finished(6, 110.0)
    moving = [operation.uuid for operation in slot.under_way]
    manager.expire(130.0)
    assert slot.state is SlotState.FINISHED
    assert used_blocks(tiers) == 0
    assert (len(manager.quarantine) > 0) == bool(moving)
    manager.remove_slot("r")
    for uuid in moving:
        assert manager.settle("r", Completion(uuid))
    assert len(manager.quarantine) == 0


@pytest.mark.parametrize("state", SlotState, ids=str)
def test_in_each_state_operations_are_taken_once_and_strangers_settle_nothing(state):
    slot = in_state(stocked()[0], state)
    before = snapshot(slot)
    assert slot.take_pending_operations() == []
    assert not slot.settle(Completion(999, {0: "io"}))
    assert slot.expire(0.0) == []
    assert snapshot(slot) == before


def refused(slot, act, kind):
    """It is refused so, and leaves the slot as it was."""
    before = snapshot(slot)
    with pytest.raises(kind, match=f"slot r: {act}"):
        ACTS[act](slot)
    assert snapshot(slot) == before


def snapshot(slot):
    names = ["state", "computed_tokens", "iteration", "deadline_s", "staged_tokens"]
    blocks = (list(map(list, slot.device_blocks)), len(slot.sequence), slot.is_settled)
    return [getattr(slot, name) for name in names], blocks


def test_where_a_guard_does_not_hold_a_slot_stays_or_finishes_later():
    slot = in_state(manager_over(), SlotState.INITIALIZED)
    slot.acquire_all_local_matches(0)
    assert slot.state is SlotState.INITIALIZED
    for state in (SlotState.ONBOARDING, SlotState.FINISHING):
        slot = in_state(stocked()[0], state)
        slot.mark_as_finished(5, 1.0)
        assert slot.state is SlotState.FINISHING
        settle_all(slot)
        assert slot.state is SlotState.FINISHED


def test_the_readme_shows_the_table():
    lines = (Path(connector.__file__).parent / "README.md").read_text().splitlines()
    first = lines.index("| state | " + " | ".join(Act) + " |")
    assert lines[first + 2 : first + 2 + len(SlotState)] == [
        f"| {state} | " + " | ".join(str(cell) for cell in row.values()) + " |"
        for state, row in TRANSITIONS.items()
    ]
