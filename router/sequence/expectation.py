"""What was expected of a booked prompt, kept until its engine says what came of it."""

from msgspec import Struct

from router.protocol.values import HashArray, Scope


class Expectation(Struct, frozen=True, eq=False):
    """Whose a prompt is, and what was known of it when it was booked.

    `found_by`: what names its blocks in caches; `overlap_blocks`: leading ones that its rank held,
    in whichever tier. `is_salted`: under a salt or a LoRA of the request's; `is_named_by_caller`:
    the caller hashed it; `has_objects`: engines count more tokens than it has, for images, say.
    """

    scope: Scope
    tenant: str | None
    found_by: HashArray
    overlap_blocks: int
    is_salted: bool = False
    is_named_by_caller: bool = False
    has_objects: bool = False
