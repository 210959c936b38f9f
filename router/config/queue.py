"""Settings of queued requests; `--help` prints them.

Fields that Dynamo's routers also have carry the same names.
"""

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from router.errors import ConfigError
from router.runtime.process.settings import DECIDES, about
from router.scheduler.queue.policy_classes import (
    KEY,
    QueuePolicy,
    decode_policy_file,
    encode_policy_file,
    queue_policies,
    single_class,
)
from router.scheduler.queue.waiting_room import Queueing


class QueueConfig(Struct, frozen=True, kw_only=True):
    """Settings of when requests are queued, in which order, and with which limits."""

    router_queue_threshold: Annotated[
        Annotated[float, Meta(ge=0, le=1e6)] | None,
        about(
            "requests wait while every rank has more prompt tokens to compute than "
            "this multiple of its max_num_batched_tokens; none: requests never "
            "wait",
            DECIDES,
        ),
    ] = None
    router_queue_policy: Annotated[
        QueuePolicy,
        about(
            "order in which a tenant's requests leave the queue: fcfs, lcfs, wspt or deadline",
            DECIDES,
        ),
    ] = "fcfs"
    router_policy_config: Annotated[
        str,
        about("TOML or JSON file that defines policy classes; empty: there is one class", DECIDES),
    ] = ""
    max_wait_s: Annotated[
        float, about("a request that waits longer is refused with 529", DECIDES, gt=0, le=86_400)
    ] = 60.0
    max_waiting_requests: Annotated[
        int,
        about(
            "limit of requests in all queues together; beyond that, 529", DECIDES, ge=1, le=65_536
        ),
    ] = 2048
    max_waiting_tokens: Annotated[
        int,
        about(
            "limit of prompt tokens in all queues together, 4 bytes each; beyond that, 529",
            DECIDES,
            ge=1,
        ),
    ] = 1 << 26

    @property
    def queueing(self) -> Queueing:
        """The settings that decisions depend on."""
        return Queueing(
            threshold_frac=self.router_queue_threshold,
            policy=self.router_queue_policy,
            policy_file=self.router_policy_config,
            max_wait_s=self.max_wait_s,
            max_requests=self.max_waiting_requests,
            max_tokens=self.max_waiting_tokens,
        )


def policy_file_text(path: str) -> str:
    """Return the content of a policy file in one line. Raises ConfigError if it is invalid."""
    try:
        text = Path(path).read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(KEY, str(error), "a readable TOML or JSON file") from error
    queue_policies(text, single_class(None, "fcfs"))
    return encode_policy_file(decode_policy_file(text))
