"""What a connector knows of one request: its tokens, the engine's blocks that hold them, its state.

    prompt ─▶ acquire_all_local_matches ─▶ mark_as_onboarding ─▶ loads settle ─▶ schedule ─▶ stores

Every operation does what `slot_table` says, or raises one of the four kinds of SlotError and leaves
the slot as it was.
"""

from collections.abc import Sequence

from router.sequence.tokens import TokenBlockSequence
from router.slot_errors import RequestKey, SlotOperationError, SlotStateError
from worker_agent.blocks.names import BlockName
from worker_agent.connector.protocol import Completion, Operation
from worker_agent.connector.slot_blocks import SlotBlocks
from worker_agent.connector.slot_table import TRANSITIONS, Act, Cell, Guard, Refusal, SlotState
from worker_agent.connector.slot_transfers import SlotFacts, SlotTransfers

_LOADING = frozenset({SlotState.ONBOARD_STAGED, SlotState.ONBOARDING})
_NOT_COMPUTING = _LOADING | {SlotState.INITIALIZED}
_OVER = frozenset({SlotState.FINISHING, SlotState.FINISHED})


class Slot:
    """One request. Pure; time is an argument.

    Invariant: blocks are held in lower tiers exactly while they are staged or being loaded.
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
        """`root`: where the names of its LoRA and salt begin."""
        self.key = key
        self.prompt_tokens = len(sequence)
        self.state = SlotState.INITIALIZED
        self.iteration = 0
        """In which it was marked last."""
        self.onboarding_iteration: int | None = None
        self.computed_tokens = 0
        self.deadline_s: float | None = None
        """When transfers that it waits for count as lost."""
        self._facts = facts
        self._blocks = SlotBlocks(key, sequence, facts.naming, root)
        self._transfers = SlotTransfers(self._blocks, facts)

    # ── Looking ──────────────────────────────────────────────────────────────────────────────────

    @property
    def sequence(self) -> TokenBlockSequence:
        """Its tokens; to read."""
        return self._blocks.sequence

    def names(self, end: int) -> Sequence[BlockName]:
        """Of its first so many full blocks, or more; to read. O(blocks not named before)."""
        return self._blocks.names(end)

    @property
    def device_blocks(self) -> Sequence[int]:
        """The engine's blocks that it has, in order; to read."""
        return self._blocks.device_blocks

    @property
    def num_device_blocks_allocated(self) -> int:
        """How many of the engine's blocks it has."""
        return len(self._blocks.device_blocks)

    @property
    def staged_tokens(self) -> int:
        """How many tokens are held for it in lower tiers, to be loaded or being loaded."""
        return self._transfers.held_blocks * self._facts.block_size

    @property
    def staged_after_tokens(self) -> int:
        """How many tokens the engine has before those."""
        return self._transfers.staged_after_blocks * self._facts.block_size

    @property
    def failed_blocks(self) -> Sequence[int]:
        """The engine's blocks that its last loads did not fill, in order, once they are done."""
        return self._transfers.ledger.failed_blocks

    @property
    def is_loaded(self) -> bool:
        """Whether no load is to be waited for."""
        return self._transfers.ledger.is_loaded

    @property
    def is_settled(self) -> bool:
        """Whether no transfer waits or is under way."""
        return self._transfers.ledger.is_settled

    @property
    def under_way(self) -> Sequence[Operation]:
        """Transfers that the worker was told of, and has not answered."""
        return self._transfers.ledger.under_way

    @property
    def is_over(self) -> bool:
        """Whether the engine is done with it."""
        return self.state in _OVER

    # ── Marks ────────────────────────────────────────────────────────────────────────────────────

    def mark_as_scheduled(self, iteration: int) -> None:
        """The engine computes something of it in this iteration. Raises SlotStateError."""
        self._pass(self._cell(Act.SCHEDULED), iteration)

    def mark_as_prefilling(self, iteration: int) -> None:
        """It computes its prompt; what was loaded and is right counts as computed.

        Raises SlotStateError.
        """
        self._pass(self._cell(Act.PREFILLING), iteration)

    def mark_as_decoding(self, iteration: int) -> None:
        """It computes what comes after. Raises SlotStateError."""
        self._pass(self._cell(Act.DECODING), iteration)

    def mark_as_not_scheduled(self, iteration: int) -> None:
        """It leaves it out. Raises SlotStateError."""
        self._pass(self._cell(Act.NOT_SCHEDULED), iteration)

    def mark_as_finished(self, iteration: int, now_s: float) -> None:
        """It is done with it, or gives it up; again is nothing. Never raises."""
        self.iteration = iteration
        if self.is_over:
            return
        if self.state is SlotState.ONBOARD_STAGED:
            self._transfers.let_go()
        self._transfers.ledger.drop_loads()
        self.state = SlotState.FINISHING
        self.deadline_s = now_s + self._facts.deadline_s
        self._note_settled()

    def preempt(self, iteration: int) -> list[int]:
        """The engine takes its blocks away; all is to be computed, or loaded, anew.

        The uuids of transfers under way, whose results must not be kept. Raises SlotStateError.
        """
        self._pass(self._cell(Act.PREEMPT), iteration)
        self._transfers.let_go()
        self._transfers.forget_stored(0)
        self._blocks.device_blocks.clear()
        self.computed_tokens = 0
        return self._transfers.ledger.void()

    # ── Loading ──────────────────────────────────────────────────────────────────────────────────

    def acquire_all_local_matches(self, num_computed_tokens: int) -> None:
        """Hold what lower tiers have of the prompt after what the engine has: `staged_tokens`.

        At least one token is left to be computed. Raises SlotOperationError, SlotPoolError.
        """
        if not self._cell(Act.ACQUIRE).guard:
            return
        first, odd = divmod(num_computed_tokens, self._facts.block_size)
        if odd or not 0 <= num_computed_tokens <= len(self.sequence):
            allowed = f"whole blocks of {self._facts.block_size} in {len(self.sequence)} tokens"
            raise self._refusal("num_computed_tokens", f"{num_computed_tokens}", allowed)
        if self._transfers.stage(first):
            self.state = SlotState.ONBOARD_STAGED

    def mark_as_onboarding(self, iteration: int, now_s: float) -> None:
        """Load what is staged into the device blocks after those that the engine has.

        One immediate transfer for each tier. Raises SlotStateError; SlotOperationError for too few
        device blocks.
        """
        cell = self._cell(Act.ONBOARDING)
        self._transfers.load()
        self._pass(cell, iteration)
        self.onboarding_iteration = iteration
        self.deadline_s = now_s + self._facts.deadline_s

    def settle(self, completion: Completion) -> bool:
        """The worker answered; False if nothing was asked, or it was answered before."""
        is_ours = self._transfers.ledger.settle(completion)
        self._note_settled()
        return is_ours

    def is_late(self, now_s: float) -> bool:
        """Whether what it waits for counts as lost."""
        return self.deadline_s is not None and now_s >= self.deadline_s

    def expire(self, now_s: float) -> list[Operation]:
        """If it is late, wait no longer. What may still be moving blocks, unknown to us."""
        return self.abandon() if self.is_late(now_s) else []

    def abandon(self) -> list[Operation]:
        """Wait for nothing. What may still be moving blocks, unknown to us."""
        if self.state is SlotState.ONBOARD_STAGED:
            self._transfers.let_go()
        unknown = self._transfers.ledger.expire("deadline")
        self._note_settled()
        return unknown

    # ── What the engine does ─────────────────────────────────────────────────────────────────────

    def advance_computed_position(self, num_tokens: int) -> None:
        """So many tokens more are computed. Raises SlotStateError, SlotOperationError."""
        self._cell(Act.ADVANCE)
        left = len(self.sequence) - self.computed_tokens
        if not 0 <= num_tokens <= left:
            raise self._refusal("num_tokens", f"{num_tokens}", f"0 to {left}")
        self.computed_tokens += num_tokens

    def append_mutable_device_blocks(self, blocks: Sequence[int]) -> None:
        """The engine gave it these, too. Raises SlotStateError, SlotOperationError."""
        self._cell(Act.APPEND)
        self._blocks.append_device(blocks)

    def schedule(
        self, iteration: int, num_computed: int, num_scheduled: int, tokens: Sequence[int] = ()
    ) -> None:
        """The engine computes so many tokens after so many; `tokens` were sampled since.

        Blocks that will be full are to be stored. The engine's count is the truth: what it computes
        again, after a load that failed, is stored again. Raises SlotStateError, and
        SlotOperationError for tokens that no device block holds.
        """
        end, block_size = num_computed + num_scheduled, self._facts.block_size
        cell = self._cell(self._act(num_computed), num_computed)
        room = len(self._blocks.device_blocks) * block_size
        if not 0 <= num_computed <= end <= room:
            raise self._refusal("num_scheduled", f"{num_computed} to {end}", f"0 to {room}")
        if tokens:
            self._blocks.append_tokens(tokens)
        if self.state in _NOT_COMPUTING:
            self._transfers.skip_stored(num_computed // block_size)
        self._pass(cell, iteration)
        if num_computed < self.computed_tokens:
            self._transfers.forget_stored(num_computed // block_size)
        self.computed_tokens = min(end, len(self._blocks.sequence))
        self._transfers.store(self.computed_tokens // block_size, iteration)

    def take_pending_operations(self) -> list[Operation]:
        """What the worker is to be told; none the second time."""
        return self._transfers.ledger.take()

    # ── How ──────────────────────────────────────────────────────────────────────────────────────

    def _cell(self, act: Act, computed_tokens: int = 0) -> Cell:
        """What the table says, if that is not a refusal."""
        cell = TRANSITIONS[self.state][act]
        if cell.refusal or cell.guard:
            self._check(cell, act, max(self.computed_tokens, computed_tokens))
        return cell

    def _check(self, cell: Cell, act: Act, computed_tokens: int) -> None:
        if cell.refusal is Refusal.STATE:
            raise SlotStateError(self.key, act, self.state)
        if cell.refusal is Refusal.OPERATION:
            raise self._refusal(act, f"while {self.state}", "as the table of slots has it")
        if cell.guard is Guard.LOADED and not self._transfers.ledger.is_loaded:
            raise SlotStateError(self.key, act, self.state, "loads are under way")
        if cell.guard is Guard.PROMPT_COMPUTED and computed_tokens < self.prompt_tokens:
            raise SlotStateError(self.key, act, self.state, "its prompt is not computed")

    def _refusal(self, field: str, reason: str, allowed: str) -> SlotOperationError:
        return SlotOperationError(self.key, field, reason, allowed)

    def _act(self, num_computed: int) -> Act:
        """What an engine that computes something of it does."""
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
            self._transfers.let_go()
            if self.state is SlotState.ONBOARDING:
                self.computed_tokens = self._transfers.right_blocks * self._facts.block_size

    def _note_settled(self) -> None:
        ledger = self._transfers.ledger
        if self.state is not SlotState.ONBOARD_STAGED and ledger.is_loaded:
            self._transfers.let_go()
        if self.state is SlotState.ONBOARDING and ledger.is_loaded:
            self.deadline_s = None
        if self.state is SlotState.FINISHING and ledger.is_settled:
            self.state = SlotState.FINISHED
            self.deadline_s = None
