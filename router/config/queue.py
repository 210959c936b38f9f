"""Settings of queued requests; `--help` prints them.

Fields that Dynamo's routers also have carry the same names.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta, Struct, ValidationError, convert

from router.errors import ConfigError
from router.protocol.requests import MOST_MS, Unmet
from router.protocol.values import Name, Scope
from router.runtime.process.settings import COMMON, DECIDES, LIVE, about
from router.scheduler.settings import OBJECTIVES, QueuePolicy

if TYPE_CHECKING:
    from router.scheduler.queue.waiting_room import Queueing
    from router.scheduler.selector import Selector


class QueueConfig(Struct, frozen=True, kw_only=True):
    """Settings of when requests are queued, in which order, and with which limits."""

    GROUP: ClassVar[str] = "waiting requests"

    router_queue_threshold: Annotated[
        Annotated[float, Meta(ge=0, le=1e6)] | None,
        about(
            "requests wait while every rank has more prompt tokens to compute than "
            "this multiple of its max_num_batched_tokens; none: requests never "
            "wait",
            DECIDES | COMMON | LIVE,
            unit="MULTIPLE",
        ),
    ] = None
    router_queue_policy: Annotated[
        QueuePolicy,
        about(
            "order in which a tenant's requests leave the queue: fcfs, lcfs, wspt or deadline",
            DECIDES | LIVE,
        ),
    ] = "fcfs"
    router_policy_config: Annotated[
        str,
        about(
            "TOML or JSON file that defines policy classes; empty: there is one class",
            DECIDES | LIVE,
            unit="FILE",
        ),
    ] = ""
    max_wait_s: Annotated[
        float,
        about(
            "a request that waits longer is refused with 529",
            DECIDES | COMMON | LIVE,
            gt=0,
            le=86_400,
        ),
    ] = 60.0
    max_waiting_requests: Annotated[
        int,
        about(
            "limit of requests in all queues together; beyond that, 529",
            DECIDES | LIVE,
            ge=1,
            le=65_536,
        ),
    ] = 2048
    max_waiting_tokens: Annotated[
        int,
        about(
            "limit of prompt tokens in all queues together, 4 bytes each; beyond that, 529",
            DECIDES | LIVE,
            ge=1,
        ),
    ] = 1 << 26
    slo_ttft_ms: Annotated[
        Annotated[float, Meta(gt=0, le=MOST_MS)] | None,
        about(
            "objective for the time to the first token of requests without their own, of models "
            "without policy classes; used by predictive",
            DECIDES | LIVE,
        ),
    ] = None
    slo_tpot_ms: Annotated[
        Annotated[float, Meta(gt=0, le=MOST_MS)] | None,
        about(
            "objective for their mean time per further output token; used by predictive",
            DECIDES | LIVE,
        ),
    ] = None
    slo_unmet: Annotated[
        Unmet,
        about(
            "requests with objectives that no rank is predicted to meet: refuse them with 429, or "
            "place them where they are missed least; a policy class may differ",
            DECIDES | LIVE,
        ),
    ] = "refuse"

    no_worker_wait_s: Annotated[
        float,
        about(
            "time for which a booking waits where its model has no schedulable worker, and has or "
            "had some or is in scale_from_zero_models; 0: it is refused at once with 503",
            DECIDES | LIVE,
            ge=0,
            le=86_400,
        ),
    ] = 0.0
    scale_from_zero_models: Annotated[
        str,
        about(
            "models whose bookings may wait for their first worker: name, or group=name outside "
            "the routing group default, separated by commas",
            DECIDES,
            unit="MODEL,…",
        ),
    ] = ""

    def unused(
        self, in_force: Sequence["Selector"], available: Sequence["Selector"]
    ) -> dict[str, str]:
        """Return the objectives that were set and no policy in force uses, with sentences."""
        from router.scheduler.ignored import no_effect, unread

        given = {each: getattr(self, each) for each in OBJECTIVES}
        reasons = {each: unread((each,), in_force, available) for each in given}
        return {
            each: no_effect(each, given[each], reason)
            for each, reason in reasons.items()
            if reason is not None and given[each] is not None
        }

    @property
    def from_zero(self) -> tuple[Scope, ...]:
        """The scopes of `scale_from_zero_models`. Raises ConfigError."""
        pairs = [each.strip() for each in self.scale_from_zero_models.split(",") if each.strip()]
        if len(pairs) > MOST_FROM_ZERO:
            allowed = f"at most {MOST_FROM_ZERO}"
            raise ConfigError("scale_from_zero_models", f"{len(pairs)} models", allowed)
        return tuple(dict.fromkeys(map(_scope_of, pairs)))

    @property
    def queueing(self) -> "Queueing":
        """The settings that decisions depend on."""
        from router.scheduler.queue.waiting_room import Queueing

        return Queueing(
            threshold_frac=self.router_queue_threshold,
            policy=self.router_queue_policy,
            policy_file=self.router_policy_config,
            max_wait_s=self.max_wait_s,
            max_requests=self.max_waiting_requests,
            max_tokens=self.max_waiting_tokens,
            no_worker_wait_s=self.no_worker_wait_s,
            from_zero=self.from_zero,
            slo_ttft_ms=self.slo_ttft_ms,
            slo_tpot_ms=self.slo_tpot_ms,
            slo_unmet=self.slo_unmet,
        )


MOST_FROM_ZERO = 64
"""Limit of the models that may wait for their first worker: each has metrics of its own."""


def _scope_of(pair: str) -> Scope:
    """Return a scope named as `model` or `group=model`. Raises ConfigError."""
    group, is_pair, model = pair.partition("=")
    try:
        names = (model.strip(), group.strip()) if is_pair else (pair, "default")
        return Scope(*(convert(each, Name) for each in names))
    except ValidationError as error:
        allowed = "model, or group=model, separated by commas"
        raise ConfigError("scale_from_zero_models", f"{pair!r}: {error}", allowed) from error


def policy_file_text(path: str) -> str:
    """Return the content of a policy file in one line. Raises ConfigError if it is invalid."""
    from router.scheduler.queue.policy_classes import (
        KEY,
        decode_policy_file,
        encode_policy_file,
        queue_policies,
        single_class,
    )

    try:
        text = Path(path).read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(KEY, str(error), "a readable TOML or JSON file") from error
    queue_policies(text, single_class(None, "fcfs"))
    return encode_policy_file(decode_policy_file(text))
