"""Settings of the endpoint picker of a gateway."""

from typing import Annotated, ClassVar, Literal

from msgspec import Struct

from router.errors import ConfigError
from router.runtime.process.settings import COMMON, about
from router.runtime.security.config import check_readable


class PickerConfig(Struct, frozen=True, kw_only=True):
    """The endpoint picker for gateways that speak Envoy's ext_proc."""

    GROUP: ClassVar[str] = "endpoint picker"

    epp_port: Annotated[
        int, about("port of the endpoint picker (gRPC); 0: none", COMMON, ge=0, le=65535)
    ] = 0
    epp_health_port: Annotated[
        int, about("port of its health service without TLS, for probes; 0: none", ge=0, le=65535)
    ] = 0
    epp_tls: Annotated[
        bool, about("serve the picker with TLS; no: without, for meshes that encrypt themselves")
    ] = True
    epp_cert_file: Annotated[
        str,
        about(
            "PEM certificate (chain) of the picker, read again when it changes; empty: a "
            "self-signed one"
        ),
    ] = ""
    epp_key_file: Annotated[str, about("PEM file of the certificate's private key")] = ""
    epp_client_ca_file: Annotated[
        str,
        about(
            "PEM file of certificate authorities; gateways must present a certificate signed by "
            "one of them"
        ),
    ] = ""
    epp_max_streams: Annotated[
        int,
        about(
            "requests in flight at gateways, each with a stream; beyond that, 503",
            ge=1,
            unit="STREAMS",
        ),
    ] = 16_384
    epp_fallbacks: Annotated[
        int,
        about(
            "further endpoints that a gateway may try, behind the chosen one; only for gateways "
            "that take a list",
            ge=0,
            le=8,
            unit="ENDPOINTS",
        ),
    ] = 0
    epp_ends: Annotated[
        Literal["stream", "access_log"],
        about(
            "what ends a booking: the stream of its request, or an entry of the gateway's access "
            "log, for gateways that close the stream before the answer ends"
        ),
    ] = "stream"
    epp_objectives: Annotated[
        str,
        about(
            "priorities of objectives, as NAME=PRIORITY,NAME=PRIORITY: the higher is placed first; "
            "below 0 a request is refused in place of waiting",
            unit="NAME=PRIORITY,…",
        ),
    ] = ""

    @property
    def priorities(self) -> dict[str, int]:
        """The priorities of objectives by name. Raises ConfigError."""
        pairs = [each.partition("=") for each in self.epp_objectives.split(",") if each.strip()]
        found = {}
        for name, _, value in pairs:
            number = value.strip()
            if not name.strip() or not number.removeprefix("-").isdigit():
                reason = repr(f"{name}={value}"[:256])
                raise ConfigError("epp_objectives", reason, "NAME=PRIORITY, such as batch=-1")
            found[name.strip()] = max(-MOST_PRIORITY, min(int(number), MOST_PRIORITY))
        return found


MOST_PRIORITY = 2**31 - 1


def check_picker(config: PickerConfig) -> None:
    """Check settings for unreadable files and contradictions. Raises ConfigError."""
    for key in ("epp_cert_file", "epp_key_file", "epp_client_ca_file"):
        check_readable(key, getattr(config, key))
    if bool(config.epp_cert_file) != bool(config.epp_key_file):
        raise ConfigError("epp_key_file", "one without the other", "certificate and key")
    if not config.epp_tls and (config.epp_cert_file or config.epp_client_ca_file):
        raise ConfigError("epp_tls", "off, with certificates", "on, or no certificates")
    _ = config.priorities  # raises for an invalid one
