"""An agent's settings of block sharing between workers."""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Struct

from router.errors import ConfigError, InvalidFieldError
from router.publisher.batch_order.address import rank_endpoint
from router.runtime.process.setting_rules import ConflictRule, check_rules
from router.runtime.process.settings import COMMON, about
from router.runtime.security.config import check_readable

_UNIX = re.compile(r"unix:///[^\s,]+")
_ADDRESSES = "tcp://host:port, or unix:///path on one host"


def rank_address(field: str, address: str, number: int) -> str:
    """Return where the engine's worker `number` gives blocks, of the address of the first.

    Worker r of data-parallel rank d has number d × workers of a rank + r. It is added to the port,
    or appended to the path unless it is 0. Raises ConfigError naming the field.
    """
    if _UNIX.fullmatch(address):
        return f"{address}-{number}" if number else address
    try:
        if address.startswith("tcp://"):
            return rank_endpoint(address, number, field)
    except InvalidFieldError as error:
        raise ConfigError(
            field, f"{address!r} for worker {number}: {error.reason}", _ADDRESSES
        ) from error
    raise ConfigError(field, f"{address!r} is no address", _ADDRESSES)


class SharingSettings(Struct, frozen=True, kw_only=True):
    """Settings of access to blocks by other workers.

    The block server listens on `host`, as for callers, and with `tls_cert_file` only with TLS.
    """

    GROUP: ClassVar[str] = "sharing between workers"

    share: Annotated[
        bool, about("workers read cached blocks from each other; needs block_key_file", COMMON)
    ] = False
    share_port: Annotated[
        int,
        about(
            "port at which other workers read blocks of the first rank; 0 takes free ports",
            ge=0,
            le=65_535,
        ),
    ] = 0
    share_address: Annotated[
        str,
        about(
            "host name under which other workers reach this one; empty: host",
            max_length=253,
            unit="HOST",
        ),
    ] = ""
    share_dir: Annotated[
        str,
        about("directory of sockets for workers on the same host, which read blocks "
"in host_cache_dir in place; empty: none"),
    ] = ""  # fmt: skip
    share_nixl: Annotated[
        bool,
        about(
            "read memory of workers on other hosts through NIXL, by RDMA where the network has it, "
            "and let theirs read ours; else over the socket. NIXL opens ports without "
            "authentication: for closed networks"
        ),
    ] = False
    share_ca_file: Annotated[
        str, about("PEM file of certificate authorities for other workers; empty: the system's")
    ] = ""
    share_max_connections: Annotated[
        int,
        about(
            "connections of other workers to each rank; beyond that, they are refused",
            ge=1,
            le=4096,
        ),
    ] = 64
    share_timeout_s: Annotated[
        float,
        about(
            "timeout of a response to another worker; its connection is then closed", gt=0, le=600
        ),
    ] = 30.0
    share_lease_s: Annotated[
        float,
        about(
            "time that a prompt's blocks are kept for the worker that decodes; 0: not kept",
            ge=0,
            le=600,
        ),
    ] = 10.0


def no_nixl_with(key: str) -> ConflictRule:
    """Return the rule that NIXL and this setting of TLS exclude each other."""
    reason = "NIXL does not encrypt the memory that it reads"
    return ConflictRule("share_nixl", key, lambda c: c.share_nixl and getattr(c, key), reason)


def _only_shared(key: str) -> ConflictRule:
    return ConflictRule(key, "share", lambda c: not c.share, "blocks are not shared")


RULES: tuple[ConflictRule, ...] = (
    ConflictRule(
        "share",
        "block_key_file",
        lambda c: c.share and not (c.block_key_file or c.block_key),
        "the fleet's secret keys shared blocks and authenticates workers",
    ),
    *(_only_shared(key) for key in SharingSettings.__annotations__ if key.startswith("share_")),
    ConflictRule(
        "share_ca_file",
        "tls_cert_file",
        lambda c: bool(c.share_ca_file) and not c.tls_cert_file,
        "blocks are sent without TLS",
    ),
    no_nixl_with("tls_cert_file"),
    ConflictRule(
        "share_port",
        "data_parallel_size",
        lambda c: c.share_port + c.data_parallel_size - 1 > 65_535,
        "every rank has its own port",
    ),
)


def check_sharing(config: Struct, share_ca_file: str, sources: Mapping[str, str]) -> None:
    """Raise ConfigError for settings of sharing that contradict each other."""
    check_rules(RULES, config, sources)
    check_readable("share_ca_file", share_ca_file)
