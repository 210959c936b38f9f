"""What callers ask over NATS, tagged by `method`: the bodies of HTTP, with what is in its paths.

`new`, `mark_prefill`, `mark_free` and `potential_loads` are also what Dynamo's router is asked; its
callers say `tokens` instead of `token_ids`.
"""

from typing import ClassVar, TypeAlias

from msgspec import Struct, structs

from router.protocol.batches import ReservationBatch, SelectBatch
from router.protocol.requests import (
    BookRequest,
    FreeRequest,
    OutputBlockRequest,
    PrefillCompleteRequest,
    PromptRequest,
    RequestId,
    SelectRequest,
)
from router.protocol.values import TokenId


class SelectCommand(SelectRequest, frozen=True, kw_only=True, tag_field="method", tag="select"):
    """Which rank should serve this prompt?"""


class SelectAndReserveCommand(
    SelectRequest, frozen=True, kw_only=True, tag_field="method", tag="select_and_reserve"
):
    """The same, and book it."""


class NewCommand(SelectRequest, frozen=True, kw_only=True, tag_field="method", tag="new"):
    """The same, answered in a few words."""

    tokens_field: ClassVar[str] = "tokens"
    tokens: list[TokenId] | None = None

    @property
    def request(self) -> SelectRequest:
        """With its tokens where others have them."""
        if self.tokens is None:
            return self
        return structs.replace(self, token_ids=self.tokens, tokens=None)


class ReserveCommand(BookRequest, frozen=True, kw_only=True, tag_field="method", tag="reserve"):
    """Book a rank that the caller chose, or what was selected."""


class PrefillCompleteCommand(
    PrefillCompleteRequest,
    frozen=True,
    kw_only=True,
    tag_field="method",
    tag="prefill_complete",
):
    """The prompt of this request is computed."""

    request_id: RequestId | None = None


class OutputBlockCommand(
    OutputBlockRequest, frozen=True, kw_only=True, tag_field="method", tag="output_block"
):
    """This request grew by a block."""

    request_id: RequestId | None = None


class FreeCommand(FreeRequest, frozen=True, kw_only=True, tag_field="method", tag="free"):
    """This request ended."""

    request_id: RequestId | None = None


class SelectBatchCommand(SelectBatch, frozen=True, tag_field="method", tag="select:batch"):
    """Which rank should serve each of these prompts?"""


class ReservationBatchCommand(
    ReservationBatch, frozen=True, tag_field="method", tag="reservations:batch"
):
    """What became of these requests."""


class MarkPrefillCommand(Struct, frozen=True, tag_field="method", tag="mark_prefill"):
    """As `prefill_complete`; an unknown request is no error."""

    request_id: RequestId | None = None


class MarkFreeCommand(Struct, frozen=True, tag_field="method", tag="mark_free"):
    """As `free`; an unknown request is no error."""

    request_id: RequestId | None = None


class PotentialLoadsCommand(
    PromptRequest, frozen=True, kw_only=True, tag_field="method", tag="potential_loads"
):
    """The load of every rank, were this prompt placed there."""

    tokens_field: ClassVar[str] = "tokens"
    tokens: list[TokenId] | None = None

    @property
    def request(self) -> PromptRequest:
        """With its tokens where others have them."""
        if self.tokens is None:
            return self
        return structs.replace(self, token_ids=self.tokens, tokens=None)


class OverlapScoresCommand(
    PromptRequest, frozen=True, kw_only=True, tag_field="method", tag="overlap_scores"
):
    """The cached prefix of every rank."""


class LoadsCommand(Struct, frozen=True, tag_field="method", tag="loads"):
    """The booked load of every rank."""


MarkCommand: TypeAlias = MarkPrefillCommand | MarkFreeCommand
BatchCommand: TypeAlias = SelectBatchCommand | ReservationBatchCommand
ProgressCommand: TypeAlias = PrefillCompleteCommand | OutputBlockCommand | FreeCommand

SingleCommand: TypeAlias = (
    SelectCommand
    | SelectAndReserveCommand
    | NewCommand
    | ReserveCommand
    | ProgressCommand
    | MarkCommand
    | PotentialLoadsCommand
    | OverlapScoresCommand
    | LoadsCommand
)
Command: TypeAlias = SingleCommand | BatchCommand
