"""Settings of discovery: engines, other routers, and a Dynamo fleet; `--help` prints them."""

from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from msgspec import Struct

from router.errors import ConfigError
from router.protocol.subjects import NAMESPACE_PATTERN
from router.runtime.process.settings import COMMON, about

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"

_LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"

VLLM = (
    '{"endpoint": "http://{ip}:8000", "kv_events_endpoint": "tcp://{ip}:5557", '
    '"replay_endpoint": "tcp://{ip}:5657", "topic": "kv@", "block_size": 16}'
)


class AttachConfig(Struct, frozen=True, kw_only=True):
    """Engines named by their URLs, which say the rest themselves."""

    GROUP: ClassVar[str] = "engines"

    workers: Annotated[
        str,
        about(
            "engines to attach, by the URLs of their OpenAI servers: http://a:8000,http://b:8000; "
            "model, block size, ranks and event sockets are asked of each",
            COMMON,
            max_length=65_536,
            unit="URL,…",
        ),
    ] = ""
    worker_token_file: Annotated[
        str, about("file with the key of the servers of these engines; empty: none")
    ] = ""
    worker_ca_file: Annotated[
        str, about("PEM file of authorities for https engines; empty: the system's")
    ] = ""
    prove_workers: Annotated[
        bool,
        about(
            "send each rank of an attached engine one small completion with a salt of its own, "
            "once in each life of the engine, and check which event socket publishes it; it costs "
            "two blocks of its cache and five steps"
        ),
    ] = True
    workers_on_other_hosts: Annotated[
        bool, about("follow event sockets that an attached engine names on another host")
    ] = False
    poll_metrics: Annotated[
        bool,
        about(
            "read the metrics of engines without an agent once a second, to learn how fast they are"
        ),
    ] = True


class ClusterConfig(Struct, frozen=True, kw_only=True):
    """A Kubernetes cluster: its API server, and the InferencePool that is served."""

    GROUP: ClassVar[str] = "engines"

    epp_pool: Annotated[
        str,
        about(
            "InferencePool whose pods are the engines, as NAMESPACE/NAME, or as NAME in this pod's "
            "namespace; a router attaches each of its ports as by workers",
            COMMON,
            pattern=rf"^(({_LABEL}/)?{_LABEL}([.]{_LABEL})*)?$",
            max_length=317,
            unit="POOL",
            form="NAME, or NAMESPACE/NAME, as Kubernetes allows them",
        ),
    ] = ""
    discovery_namespace: Annotated[
        str,
        about(
            "Kubernetes namespace of the engines; empty: this pod's",
            pattern="^[a-z0-9-]{0,63}$",
            form="a-z, 0-9 and -, at most 63 of them",
        ),
    ] = ""
    discovery_api_url: Annotated[
        str,
        about(
            "URL of the Kubernetes API server; empty: this cluster's",
            pattern="^$|^https?://[^/]+$",
            form="http://host:port, or https://host:port",
        ),
    ] = ""
    discovery_token_file: Annotated[
        str, about("file with a token for the API server, read at every request; empty: none")
    ] = f"{ACCOUNT}/token"
    discovery_ca_file: Annotated[
        str, about("PEM file of certificate authorities for the API server; empty: the system's")
    ] = f"{ACCOUNT}/ca.crt"
    discovery_timeout_s: Annotated[
        float, about("timeout of a response of the API server", gt=0, le=60)
    ] = 10.0


class DiscoveryConfig(Struct, frozen=True, kw_only=True):
    """The pods that are engines, by their labels, and the endpoints of their events."""

    GROUP: ClassVar[str] = "engines"

    discovery: Annotated[
        Literal["none", "pods", "endpointslices"],
        about("find engines in Kubernetes: none, pods or endpointslices", COMMON),
    ] = "none"
    discovery_selector: Annotated[
        str,
        about(
            "label selector of the engines, for example app=vllm; required with discovery",
            COMMON,
            max_length=1024,
        ),
    ] = ""
    discovery_worker: Annotated[
        str,
        about(
            "registration of each engine: JSON for POST /workers, with {ip} and "
            "{name}; the pod annotation kv-router/worker overrides single fields",
            max_length=16_384,
            unit="JSON",
        ),
    ] = VLLM
    discovery_max_workers: Annotated[
        int,
        about(
            "limit of registered engines, which are taken in the order of their names",
            ge=1,
            le=65_536,
        ),
    ] = 1024
    discovery_unready_s: Annotated[
        float, about("an engine that is not ready for this time is unregistered", ge=0)
    ] = 10.0


class PeerConfig(Struct, frozen=True, kw_only=True):
    """The other routers without a bus: where they are, and how to log in to them."""

    GROUP: ClassVar[str] = "other routers"

    router_peers: Annotated[
        str,
        about(
            "other routers to share reservations with, without NATS: a:8092,b:8092; this router's "
            "own address may be among them",
            max_length=65_536,
            unit="ADDRESSES",
        ),
    ] = ""
    router_service: Annotated[
        str,
        about(
            "Kubernetes Service whose pods are the routers to share reservations with, without "
            "NATS, as NAMESPACE/NAME, or as NAME in this pod's namespace; all at this http_port",
            pattern=rf"^(({_LABEL}/)?{_LABEL})?$",
            max_length=127,
            unit="SERVICE",
            form="NAME, or NAMESPACE/NAME, as Kubernetes allows them",
        ),
    ] = ""
    router_peers_token_file: Annotated[
        str,
        about("file with a token of scope replicas, for the other routers; empty: none"),
    ] = ""
    router_peers_ca_file: Annotated[
        str,
        about(
            "PEM file of authorities for the other routers, if this one serves HTTPS, as they do; "
            "empty: the system's"
        ),
    ] = ""

    @property
    def are_set(self) -> bool:
        """True if reservations are shared without a bus."""
        return bool(self.router_peers or self.router_service)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of `router_peers`. Raises ConfigError."""
        from router.sequence.replicas.replica_set import MAX_REPLICAS

        named = (each.strip() for each in self.router_peers.split(","))
        addresses = tuple(dict.fromkeys(filter(None, named)))
        for each in addresses:
            if not _is_address(each):
                raise ConfigError("router_peers", repr(each[:256]), "host:port,host:port")
        if len(addresses) > MAX_REPLICAS:
            reason, allowed = f"{len(addresses)} addresses", f"at most {MAX_REPLICAS}"
            raise ConfigError("router_peers", reason, allowed)
        return addresses


def _is_address(text: str) -> bool:
    """Return whether a text is host:port, and nothing else."""
    try:
        parts = urlsplit(f"//{text}")
        is_whole = bool(parts.hostname and parts.port) and parts.netloc == text
        _ = (parts.hostname or "").encode("idna")  # raises for labels that no name may have
    except ValueError:
        return False
    return is_whole and text.isascii() and text.isprintable() and not set(text) & set("@ ")


class DynamoConfig(Struct, frozen=True, kw_only=True):
    """A Dynamo fleet to follow."""

    GROUP: ClassVar[str] = "a Dynamo fleet"

    shadow: Annotated[
        bool,
        about("only compare this router's choices with a Dynamo router's, and book the latter"),
    ] = False
    dynamo_namespace: Annotated[
        str,
        about(
            "namespace of a Dynamo fleet to follow; empty: none",
            pattern=f"^({NAMESPACE_PATTERN})?$",
            form="letters, digits, _ and -, at most 64 of them",
        ),
    ] = ""
    dynamo_component: Annotated[
        str,
        about(
            "component of the Dynamo fleet's workers, for example backend",
            pattern=f"^({NAMESPACE_PATTERN})?$",
            unit="NAME",
            form="letters, digits, _ and -, at most 64 of them",
        ),
    ] = ""
    dynamo_nats_url: Annotated[str, about("NATS server of the Dynamo fleet; empty: nats_url")] = ""
    dynamo_model_name: Annotated[
        str, about("model that the Dynamo fleet's workers serve", min_length=1, max_length=256)
    ] = "default"
    dynamo_routing_group: Annotated[
        str, about("routing group of the Dynamo fleet's workers", min_length=1, max_length=256)
    ] = "default"
    dynamo_block_size: Annotated[
        int,
        about(
            "tokens per block in the Dynamo fleet; required, because its events lack it",
            ge=0,
            le=65_536,
        ),
    ] = 0
    dynamo_max_num_batched_tokens: Annotated[
        int, about("max_num_batched_tokens of each of the Dynamo fleet's workers", ge=1)
    ] = 8192
    dynamo_total_kv_blocks: Annotated[
        int, about("KV blocks of each rank of the Dynamo fleet", ge=1)
    ] = 16_384
    dynamo_max_ranks: Annotated[
        int, about("limit of the ranks followed in the Dynamo fleet", ge=1, le=65_536)
    ] = 1024
    dynamo_silence_s: Annotated[
        float, about("a worker of the Dynamo fleet that is silent for this time is removed", gt=0)
    ] = 600.0
