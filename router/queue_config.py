"""Configuration of requests that wait; `--help` prints it.

Fields that Dynamo's routers have too are named as there.
"""

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from router.errors import ConfigError
from router.policy_config import PolicyConfig
from router.scheduler.policy_classes import QueuePolicy, single_class
from router.scheduler.policy_file import (
    KEY,
    decode_policy_file,
    encode_policy_file,
    queue_policies,
)
from router.scheduler.waiting_room import Queueing


class QueueConfig(PolicyConfig, frozen=True, kw_only=True):
    """When requests wait, in what order, and how many."""

    router_queue_threshold: Annotated[
        Annotated[float, Meta(ge=0, le=1e6)] | None,
        Meta(
            description=(
                "requests wait while every rank has more prompt tokens to compute than "
                "this multiple of its max_num_batched_tokens; none: requests never "
                "wait"
            )
        ),
    ] = None
    router_queue_policy: Annotated[
        QueuePolicy,
        Meta(
            description=(
                "order in which a tenant's requests leave the queue: fcfs, lcfs, wspt or deadline"
            )
        ),
    ] = "fcfs"
    router_policy_config: Annotated[
        str,
        Meta(
            description=("TOML or JSON file that defines policy classes; empty: there is one class")
        ),
    ] = ""
    max_wait_s: Annotated[
        float, Meta(gt=0, le=86_400, description="a request that waits longer is refused with 529")
    ] = 60.0
    max_waiting_requests: Annotated[
        int,
        Meta(
            ge=1,
            le=65_536,
            description="limit of requests in all queues together; beyond that, 529",
        ),
    ] = 2048
    max_waiting_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "limit of prompt tokens in all queues together, 4 bytes each; beyond that, 529"
            ),
        ),
    ] = 1 << 26

    @property
    def queueing(self) -> Queueing:
        """The part that concerns decisions."""
        return Queueing(
            threshold_frac=self.router_queue_threshold,
            policy=self.router_queue_policy,
            policy_file=self.router_policy_config,
            max_wait_s=self.max_wait_s,
            max_requests=self.max_waiting_requests,
            max_tokens=self.max_waiting_tokens,
        )


def policy_file_text(path: str) -> str:
    """What a policy file says, in one line. Raises ConfigError where it makes no sense."""
    try:
        text = Path(path).read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(KEY, str(error), "a readable TOML or JSON file") from error
    queue_policies(text, single_class(None, "fcfs"))
    return encode_policy_file(decode_policy_file(text))
