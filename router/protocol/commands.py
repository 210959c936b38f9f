"""The commands of callers over NATS, tagged by `method`: HTTP bodies plus the fields of the paths.

`new`, `mark_prefill`, `mark_free` and `potential_loads` are also commands of Dynamo's router; its
callers send `tokens` instead of `token_ids`.
"""

from typing import ClassVar, TypeAlias

from msgspec import Struct, structs

from router.protocol.batches import ReservationBatch, SelectBatch
from router.protocol.requests import (
    BookRequest,
    FreeRequest,
    OutputBlockRequest,
    PotentialLoadsRequest,
    PrefillCompleteRequest,
    PromptRequest,
    RequestId,
    SelectRequest,
)
from router.protocol.values import TokenId


class SelectCommand(SelectRequest, frozen=True, kw_only=True, tag_field="method", tag="select"):
    """A request to select a rank for a prompt."""


class SelectAndReserveCommand(
    SelectRequest, frozen=True, kw_only=True, tag_field="method", tag="select_and_reserve"
):
    """A request to select a rank for a prompt and book it."""


class NewCommand(SelectRequest, frozen=True, kw_only=True, tag_field="method", tag="new"):
    """A request to select a rank for a prompt and book it, with a short reply."""

    tokens_field: ClassVar[str] = "tokens"
    tokens: list[TokenId] | None = None

    @property
    def request(self) -> SelectRequest:
        """The request with its tokens in `token_ids`."""
        if self.tokens is None:
            return self
        return structs.replace(self, token_ids=self.tokens, tokens=None)


class ReserveCommand(BookRequest, frozen=True, kw_only=True, tag_field="method", tag="reserve"):
    """A request to book a rank that the caller chose, or an earlier selection."""


class PrefillCompleteCommand(
    PrefillCompleteRequest,
    frozen=True,
    kw_only=True,
    tag_field="method",
    tag="prefill_complete",
):
    """A report that the prompt of this request is computed."""

    request_id: RequestId | None = None


class OutputBlockCommand(
    OutputBlockRequest, frozen=True, kw_only=True, tag_field="method", tag="output_block"
):
    """A report that the output of this request grew by a block."""

    request_id: RequestId | None = None


class FreeCommand(FreeRequest, frozen=True, kw_only=True, tag_field="method", tag="free"):
    """A report that this request ended."""

    request_id: RequestId | None = None


class SelectBatchCommand(SelectBatch, frozen=True, tag_field="method", tag="select:batch"):
    """A request to select a rank for each of these prompts."""


class ReservationBatchCommand(
    ReservationBatch, frozen=True, tag_field="method", tag="reservations:batch"
):
    """A report of many steps of reservations."""


class MarkPrefillCommand(Struct, frozen=True, tag_field="method", tag="mark_prefill"):
    """A report as `prefill_complete`; an unknown request is no error."""

    request_id: RequestId | None = None


class MarkFreeCommand(Struct, frozen=True, tag_field="method", tag="mark_free"):
    """A report as `free`; an unknown request is no error."""

    request_id: RequestId | None = None


class PotentialLoadsCommand(
    PotentialLoadsRequest, frozen=True, kw_only=True, tag_field="method", tag="potential_loads"
):
    """A query for the load of every rank if this prompt were placed there."""

    tokens_field: ClassVar[str] = "tokens"
    tokens: list[TokenId] | None = None

    @property
    def request(self) -> PotentialLoadsRequest:
        """The request with its tokens in `token_ids`."""
        if self.tokens is None:
            return self
        return structs.replace(self, token_ids=self.tokens, tokens=None)


class OverlapScoresCommand(
    PromptRequest, frozen=True, kw_only=True, tag_field="method", tag="overlap_scores"
):
    """A query for the cached prefix on every rank."""


class LoadsCommand(Struct, frozen=True, tag_field="method", tag="loads"):
    """A query for the booked load of every rank."""


class CapacityCommand(Struct, frozen=True, tag_field="method", tag="capacity"):
    """A query for the demand on each pool of workers, and its supply."""


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
    | CapacityCommand
)
Command: TypeAlias = SingleCommand | BatchCommand
