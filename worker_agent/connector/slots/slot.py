"""The connector's state of one request: its tokens, the engine's blocks for them, its transfers.

    prompt ─▶ acquire_all_local_matches ─▶ mark_as_onboarding ─▶ loads settle ─▶ schedule ─▶ stores

Every operation follows `slot_table`, or raises one of the four kinds of SlotError and leaves the
slot unchanged.
"""

from collections.abc import Sequence

from router.sequence.hashing.tokens import TokenBlockSequence
from worker_agent.blocks.names import BlockName
from worker_agent.connector.slots.errors import RequestKey, SlotOperationError, SlotStateError
from worker_agent.connector.slots.protocol import Completion, Operation
from worker_agent.connector.slots.slot_blocks import BlockTables, SlotBlocks
from worker_agent.connector.slots.slot_table import (
    TRANSITIONS,
    Act,
    Cell,
    Guard,
    InvalidTransition,
    SlotState,
)
from worker_agent.connector.slots.slot_transfers import SlotFacts, SlotTransfers

_LOADING = frozenset({SlotState.ONBOARD_STAGED, SlotState.ONBOARDING})
_NOT_COMPUTING = _LOADING | {SlotState.INITIALIZED}
_OVER = frozenset({SlotState.FINISHING, SlotState.FINISHED})


class Slot:
    """One request. Without side effects; time is an argument.

    Invariant: blocks in lower tiers are held exactly while they are staged or being loaded.
    """

    __slots__ = (
        "_blocks",
        "_facts",
        "_transfers",
        "computed_tokens",
        "deadline_s",
        "iteration",
        "key",
        "onboarding_iteration",
        "prompt_tokens",
        "state",
    )

    def __init__(
        self, key: RequestKey, sequence: TokenBlockSequence, root: bytes, facts: SlotFacts
    ) -> None:
        """Create the slot. `root`: the start of block names for its LoRA adapter and salt."""
        self.key = key
        self.prompt_tokens = len(sequence)
        self.state = SlotState.INITIALIZED
        self.iteration = 0
        """Iteration of the last mark."""
        self.onboarding_iteration: int | None = None
        self.computed_tokens = 0
        self.deadline_s: float | None = None
        """Time at which pending transfers count as lost; None if none is waited for."""
        self._facts = facts
        self._blocks = SlotBlocks(key, sequence, facts.groups, facts.naming, root)
        self._transfers = SlotTransfers(self._blocks, facts)

    # ── Looking ──────────────────────────────────────────────────────────────────────────────────

    @property
    def sequence(self) -> TokenBlockSequence:
        """Its tokens; read-only."""
        return self._blocks.sequence

    @property
    def last_boundary(self) -> int:
        """The last token at which its prompt could be resumed."""
        return self._blocks.last_boundary

    def names_behind(self, num_computed: int, known_tokens: int, limit: int) -> list[BlockName]:
        """Return blocks that could serve to resume its prompt behind `known_tokens`.

        At most `limit`, without those of the first `num_computed` tokens, which the engine has.
        O(tokens)
        """
        return self._transfers.names_behind(num_computed, known_tokens, limit)

    @property
    def device_blocks(self) -> BlockTables:
        """The engine's blocks of the request, in order for each group; read-only."""
        return self._blocks.device_blocks

    @property
    def staged_tokens(self) -> int:
        """Number of its tokens held in lower tiers, staged or being loaded."""
        return self._transfers.held_tokens

    @property
    def staged_after_tokens(self) -> int:
        """Number of the engine's tokens before the staged ones."""
        return self._transfers.staged_after_tokens

    @property
    def failed_blocks(self) -> Sequence[int]:
        """The engine's blocks that the last loads did not fill, in order; valid once done."""
        return self._transfers.ledger.failed_blocks

    @property
    def is_loaded(self) -> bool:
        """True if no load is waited for."""
        return self._transfers.ledger.is_loaded

    @property
    def is_settled(self) -> bool:
        """True if no transfer is pending or in flight."""
        return self._transfers.ledger.is_settled

    @property
    def under_way(self) -> Sequence[Operation]:
        """Transfers sent to the worker and not completed."""
        return self._transfers.ledger.under_way

    @property
    def is_over(self) -> bool:
        """True if the engine has finished the request."""
        return self.state in _OVER

    # ── Marks ────────────────────────────────────────────────────────────────────────────────────

    def mark_as_scheduled(self, iteration: int) -> None:
        """Mark that the engine computes tokens of it in this iteration. Raises SlotStateError."""
        self._pass(self._cell(Act.SCHEDULED), iteration)

    def mark_as_prefilling(self, iteration: int) -> None:
        """Mark that the engine computes its prompt; verified loaded blocks count as computed.

        Raises SlotStateError.
        """
        self._pass(self._cell(Act.PREFILLING), iteration)

    def mark_as_decoding(self, iteration: int) -> None:
        """Mark that the engine computes output tokens. Raises SlotStateError."""
        self._pass(self._cell(Act.DECODING), iteration)

    def mark_as_not_scheduled(self, iteration: int) -> None:
        """Mark that the engine leaves it out of this iteration. Raises SlotStateError."""
        self._pass(self._cell(Act.NOT_SCHEDULED), iteration)

    def mark_as_finished(self, iteration: int, now_s: float) -> None:
        """Mark that the engine has finished or aborted it. Never raises; may be repeated."""
        self.iteration = iteration
        if self.is_over:
            return
        if self.state is SlotState.ONBOARD_STAGED:
            self._transfers.release()
        self._transfers.ledger.drop_loads()
        self.state = SlotState.FINISHING
        self.deadline_s = now_s + self._facts.deadline_s
        self._note_settled()

    def preempt(self, iteration: int) -> list[int]:
        """Reset the slot after preemption; all its blocks are to be computed, or loaded, again.

        Returns the uuids of transfers in flight; their results must be discarded. Raises
        SlotStateError.
        """
        self._pass(self._cell(Act.PREEMPT), iteration)
        self._transfers.release()
        self._transfers.forget_stored(0)
        self._blocks.clear_device()
        self.computed_tokens = 0
        return self._transfers.ledger.void()

    # ── Loading ──────────────────────────────────────────────────────────────────────────────────

    def acquire_all_local_matches(self, num_computed_tokens: int) -> None:
        """Hold the prompt's blocks in lower tiers behind the engine's; sets `staged_tokens`.

        At least one token is left to be computed. Raises SlotOperationError, SlotPoolError.
        """
        if not self._cell(Act.ACQUIRE).guard:
            return
        alignment, length = self._facts.groups.alignment, len(self.sequence)
        if num_computed_tokens % alignment or not 0 <= num_computed_tokens <= length:
            allowed = f"whole blocks of {alignment} in {length} tokens"
            raise self._refusal("num_computed_tokens", f"{num_computed_tokens}", allowed)
        if self._transfers.stage(num_computed_tokens):
            self.state = SlotState.ONBOARD_STAGED

    def mark_as_onboarding(self, iteration: int, now_s: float) -> None:
        """Load the staged blocks into the device blocks behind those that the engine has.

        Creates one immediate transfer for each tier. Raises SlotStateError, and SlotOperationError
        if there are too few device blocks.
        """
        cell = self._cell(Act.ONBOARDING)
        self._transfers.load()
        self._pass(cell, iteration)
        self.onboarding_iteration = iteration
        self.deadline_s = now_s + self._facts.deadline_s

    def settle(self, completion: Completion) -> bool:
        """Record a completion; return False if the transfer is unknown or already complete."""
        is_ours = self._transfers.ledger.settle(completion)
        self._note_settled()
        return is_ours

    def is_late(self, now_s: float) -> bool:
        """Return whether its pending transfers count as lost."""
        return self.deadline_s is not None and now_s >= self.deadline_s

    def expire(self, now_s: float) -> list[Operation]:
        """Stop waiting if it is late; return the transfers that may still be running."""
        return self.abandon() if self.is_late(now_s) else []

    def abandon(self) -> list[Operation]:
        """Stop waiting for all transfers; return those that may still be running."""
        if self.state is SlotState.ONBOARD_STAGED:
            self._transfers.release()
        unknown = self._transfers.ledger.expire("deadline")
        self._note_settled()
        return unknown

    # ── What the engine does ─────────────────────────────────────────────────────────────────────

    def advance_computed_position(self, num_tokens: int) -> None:
        """Count `num_tokens` further computed tokens. Raises SlotStateError, SlotOperationError."""
        self._cell(Act.ADVANCE)
        left = len(self.sequence) - self.computed_tokens
        if not 0 <= num_tokens <= left:
            raise self._refusal("num_tokens", f"{num_tokens}", f"0 to {left}")
        self.computed_tokens += num_tokens

    def append_mutable_device_blocks(self, tables: BlockTables) -> None:
        """Append the engine's new blocks of each group. Raises SlotStateError, SlotOperationError.

        `forget_passed` comes first if the request has computed tokens since the last call.
        """
        self._cell(Act.APPEND)
        self._blocks.append_device(tables)

    def extend_device_blocks(self, tables: BlockTables) -> None:
        """Take on the engine's blocks of each group, all that the request has.

        Raises SlotStateError, SlotOperationError.
        """
        self._cell(Act.APPEND)
        self._blocks.extend_device(tables)

    def forget_passed(self, num_computed: int) -> None:
        """Forget the engine's blocks that no window behind `num_computed` tokens needs."""
        self._blocks.forget_passed(num_computed)

    def schedule(
        self, iteration: int, num_computed: int, num_scheduled: int, tokens: Sequence[int] = ()
    ) -> None:
        """Record that the engine computes `num_scheduled` tokens after `num_computed` ones.

        `tokens`: those sampled since the last call. Blocks that will be full are stored. The
        engine's count is authoritative: tokens that it computes again, after a failed load, are
        stored again. Raises SlotStateError, and SlotOperationError for tokens without a device
        block.
        """
        end, room = num_computed + num_scheduled, self._blocks.room_tokens
        cell = self._cell(self._act(num_computed), num_computed)
        if not 0 <= num_computed <= end <= room:
            raise self._refusal("num_scheduled", f"{num_computed} to {end}", f"0 to {room}")
        if tokens:
            self._blocks.append_tokens(tokens)
        if self.state in _NOT_COMPUTING:
            self._transfers.skip_stored(num_computed)
        self._pass(cell, iteration)
        if num_computed < self.computed_tokens:
            self._transfers.forget_stored(num_computed)
        self.computed_tokens = min(end, len(self._blocks.sequence))
        self._transfers.store(num_computed, self.computed_tokens, iteration)

    def take_pending_operations(self) -> list[Operation]:
        """Return the pending operations for the worker, each once."""
        return self._transfers.ledger.take()

    # ── How ──────────────────────────────────────────────────────────────────────────────────────

    def _cell(self, act: Act, computed_tokens: int = 0) -> Cell:
        """Return the table's cell. Raises SlotError if the cell or its guard refuses."""
        cell = TRANSITIONS[self.state][act]
        if cell.refusal or cell.guard:
            self._check(cell, act, max(self.computed_tokens, computed_tokens))
        return cell

    def _check(self, cell: Cell, act: Act, computed_tokens: int) -> None:
        if cell.refusal is InvalidTransition.STATE:
            raise SlotStateError(self.key, act, self.state)
        if cell.refusal is InvalidTransition.OPERATION:
            raise self._refusal(act, f"while {self.state}", "an operation valid in this state")
        if cell.guard is Guard.LOADED and not self._transfers.ledger.is_loaded:
            raise SlotStateError(self.key, act, self.state, "loads are under way")
        if cell.guard is Guard.PROMPT_COMPUTED and computed_tokens < self.prompt_tokens:
            raise SlotStateError(self.key, act, self.state, "its prompt is not computed")

    def _refusal(self, field: str, reason: str, allowed: str) -> SlotOperationError:
        return SlotOperationError(self.key, field, reason, allowed)

    def _act(self, num_computed: int) -> Act:
        """Return the act of an engine that computes tokens of the request."""
        if self.state is SlotState.DECODING:
            return Act.DECODING
        is_prefill = num_computed < self.prompt_tokens or self.state in _LOADING
        return Act.PREFILLING if is_prefill else Act.DECODING

    def _pass(self, cell: Cell, iteration: int) -> None:
        self.iteration = iteration
        if cell.to is None:
            return
        if self.state in _LOADING:
            self._leave_loading(cell.to)
        self.state = cell.to

    def _leave_loading(self, to: SlotState) -> None:
        if to is SlotState.PREFILLING:
            self._transfers.release()
            if self.state is SlotState.ONBOARDING:
                self.computed_tokens = self._transfers.right_tokens

    def _note_settled(self) -> None:
        ledger = self._transfers.ledger
        if self.state is not SlotState.ONBOARD_STAGED and ledger.is_loaded:
            self._transfers.release()
        if self.state is SlotState.ONBOARDING and ledger.is_loaded:
            self.deadline_s = None
        if self.state is SlotState.FINISHING and ledger.is_settled:
            self.state = SlotState.FINISHED
            self.deadline_s = None
