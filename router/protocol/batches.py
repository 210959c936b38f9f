"""Many questions, or many steps, in one call. Each item is answered by itself: a bad one does not
spoil the others.
"""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Raw, Struct

from router.protocol.replies import Decision
from router.protocol.requests import RequestId, Usage

MAX_SELECTIONS = 256
MAX_STEPS = 4_096

Step: TypeAlias = Literal["prefill_complete", "output_block", "free"]


class SelectBatch(Struct, frozen=True):
    """Requests, each as `/select` takes it; they are answered in order."""

    requests: Annotated[
        list[Raw],
        Meta(
            max_length=MAX_SELECTIONS,
            extra_json_schema={"items": {"$ref": "#/components/schemas/SelectRequest"}},
        ),
    ]


class ReservationStep(Struct, frozen=True, kw_only=True):
    """What became of a reservation, by either name of its id; as the routes of the same names take
    it.
    """

    step: Step
    request_id: RequestId | None = None
    selection_id: RequestId | None = None
    decay_fraction: float | None = None
    usage: Usage | None = None


class ReservationBatch(Struct, frozen=True):
    """Steps of reservations, taken in order. `at_once`: they are told as they happen, so nothing
    grows untold until the next batch.
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
    """How one item went: the status it would have had alone, and its answer or its refusal."""

    status: int
    decision: Decision | None = None
    refused: dict[str, Any] | None = None


class BatchReply(Struct, frozen=True):
    """The results, in the order of the items."""

    results: list[ItemResult]
