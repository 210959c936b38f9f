"""Batches of selections or of reservation steps in one call.

Each item has its own result: an invalid item does not affect the others.
"""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Raw, Struct

from router.protocol.replies import Decision
from router.protocol.requests import RequestId, Usage

MAX_SELECTIONS = 256
MAX_STEPS = 4_096

Step: TypeAlias = Literal["prefill_complete", "output_block", "free"]


class SelectBatch(Struct, frozen=True):
    """Selection requests, each as `/select` takes it. Results are in the same order."""

    requests: Annotated[
        list[Raw],
        Meta(
            max_length=MAX_SELECTIONS,
            extra_json_schema={"items": {"$ref": "#/components/schemas/SelectRequest"}},
        ),
    ]


class ReservationStep(Struct, frozen=True, kw_only=True):
    """A step of a reservation, with the fields of the route of the same name.

    The reservation is named by either form of its id.
    """

    step: Step
    request_id: RequestId | None = None
    selection_id: RequestId | None = None
    decay_fraction: float | None = None
    usage: Usage | None = None


class ReservationBatch(Struct, frozen=True):
    """Steps of reservations, applied in order.

    `at_once`: the steps are reported as they happen, so no output grows unreported until the next
    batch.
    """

    steps: Annotated[
        list[Raw],
        Meta(
            max_length=MAX_STEPS,
            extra_json_schema={"items": {"$ref": "#/components/schemas/ReservationStep"}},
        ),
    ]
    at_once: bool = False


class ItemResult(Struct, frozen=True, omit_defaults=True):
    """The result of one item: the status of a single call, and its decision or its error."""

    status: int
    decision: Decision | None = None
    refused: dict[str, Any] | None = None


class BatchReply(Struct, frozen=True):
    """The results, in the order of the items."""

    results: list[ItemResult]
