"""What an agent can be told of the blocks that workers give each other."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from router.contradictions import Rule, check_rules
from router.security.config import check_readable
from worker_agent.tier_settings import TierSettings


class SharingSettings(TierSettings, frozen=True, kw_only=True):
    """Whether and where other workers may have this one's blocks; it listens on `host`, as for
    callers, and with `tls_cert_file` only to TLS.
    """

    share: Annotated[
        bool,
        Meta(description="let workers read cached blocks from each other; needs block_key_file"),
    ] = False
    share_port: Annotated[
        int,
        Meta(
            ge=0,
            le=65_535,
            description=(
                "port at which other workers read blocks of the first rank; 0 takes free ports"
            ),
        ),
    ] = 0
    share_address: Annotated[
        str,
        Meta(
            max_length=253,
            description="host name under which other workers reach this one; empty: host",
        ),
    ] = ""
    share_dir: Annotated[
        str,
        Meta(description=(
"directory of sockets for workers on the same host, which read blocks "
"in host_cache_dir in place; empty: none"
)),
    ] = ""  # fmt: skip
    share_ca_file: Annotated[
        str,
        Meta(
            description=(
                "PEM file of certificate authorities for other workers; empty: the system's"
            )
        ),
    ] = ""
    share_max_connections: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description=(
                "connections of other workers to each rank; beyond that, they are refused"
            ),
        ),
    ] = 64
    share_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            le=600,
            description=(
                "time to send one answer to another worker; after that its connection is closed"
            ),
        ),
    ] = 30.0


def _only_shared(key: str) -> Rule[SharingSettings]:
    return Rule(key, "share", lambda c: not c.share, "blocks are given to nobody")


RULES: tuple[Rule[SharingSettings], ...] = (
    Rule(
        "share",
        "block_key_file",
        lambda c: c.share and not (c.block_key_file or c.block_key),
        "workers that share blocks name them, and know each other, by the fleet's secret",
    ),
    *(_only_shared(key) for key in SharingSettings.__annotations__ if key.startswith("share_")),
    Rule(
        "share_ca_file",
        "tls_cert_file",
        lambda c: bool(c.share_ca_file) and not c.tls_cert_file,
        "blocks are given without TLS",
    ),
    Rule(
        "share_port",
        "data_parallel_size",
        lambda c: c.share_port + c.data_parallel_size - 1 > 65_535,
        "every rank has a port of its own",
    ),
)


def check_sharing(config: SharingSettings, sources: Mapping[str, str]) -> None:
    """Refuse settings of sharing that contradict each other. Raises ConfigError."""
    check_rules(RULES, config, sources)
    check_readable("share_ca_file", config.share_ca_file)
