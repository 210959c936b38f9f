"""Settings of session affinity; `--help` prints them."""

from typing import Annotated, ClassVar, Literal, TypeAlias

from msgspec import Struct

from router.runtime.process.settings import COMMON, DECIDES, about
from router.runtime.security.redis_access import RedisAccess

AffinityMode: TypeAlias = Literal["hard", "soft"]


class SessionConfig(Struct, frozen=True, kw_only=True):
    """Session affinity, and the Redis server in which routers share it."""

    GROUP: ClassVar[str] = "sessions"

    session_affinity_ttl_s: Annotated[
        float,
        about(
            "a session stays on its rank until it has been idle for this long; 0: "
            "no session affinity",
            COMMON,
            ge=0,
            le=31_536_000,
        ),
    ] = 0.0
    session_affinity_mode: Annotated[
        AffinityMode,
        about(
            "hard: requests of a session wait for its rank; soft: while it is busy "
            "they go to another",
            DECIDES,
        ),
    ] = "hard"
    session_affinity_max_sessions: Annotated[
        int,
        about(
            "sessions remembered by this router; beyond that, the one idle longest is removed",
            ge=1,
            le=1 << 24,
            unit="SESSIONS",
        ),
    ] = 65_536
    redis_url: Annotated[
        str, about("Redis server in which routers share sessions; empty: each router keeps its own")
    ] = ""
    redis_username: Annotated[str, about("Redis user (ACL); empty: the default user")] = ""
    redis_password_file: Annotated[str, about("file with that user's password")] = ""
    redis_tls_ca_file: Annotated[
        str, about("PEM file of certificate authorities for rediss://; empty: the system's")
    ] = ""
    redis_tls_cert_file: Annotated[str, about("PEM certificate for Redis")] = ""
    redis_tls_key_file: Annotated[str, about("PEM file of the certificate's private key")] = ""
    redis_timeout_s: Annotated[
        float,
        about("timeout of a Redis request; then the router continues without Redis", gt=0, le=10),
    ] = 0.05

    @property
    def is_hard(self) -> bool:
        """True if requests of a session wait for its rank."""
        return self.session_affinity_mode == "hard"

    @property
    def redis_access(self) -> RedisAccess:
        """Credentials and TLS of the Redis server."""
        return RedisAccess(
            self.redis_username,
            self.redis_password_file,
            self.redis_tls_ca_file,
            self.redis_tls_cert_file,
            self.redis_tls_key_file,
        )
