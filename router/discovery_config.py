"""Configuration of whom a router finds by itself; `--help` prints it."""

from typing import Annotated, Literal

from msgspec import Meta

from router.observing_config import ObservingConfig

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"

VLLM = (
    '{"endpoint": "http://{ip}:8000", "kv_events_endpoint": "tcp://{ip}:5557", '
    '"replay_endpoint": "tcp://{ip}:5657", "topic": "kv@", "block_size": 16}'
)


class DiscoveryConfig(ObservingConfig, frozen=True, kw_only=True):
    """Which pods of a Kubernetes cluster are engines, and where theirs can be heard."""

    discovery: Annotated[
        Literal["none", "pods", "endpointslices"],
        Meta(description="find engines in Kubernetes: none, pods or endpointslices"),
    ] = "none"
    discovery_selector: Annotated[
        str,
        Meta(
            max_length=1024, description="label selector of the engines, such as app=vllm; required"
        ),
    ] = ""
    discovery_worker: Annotated[
        str,
        Meta(
            max_length=16_384,
            description="what each is, as POST /workers takes it, with {ip} and {name}; a pod's "
            "annotation kv-router/worker says more",
        ),
    ] = VLLM
    discovery_namespace: Annotated[
        str,
        Meta(
            pattern="^[a-z0-9-]{0,63}$", description="namespace of the engines; empty: this pod's"
        ),
    ] = ""
    discovery_api_url: Annotated[
        str, Meta(pattern="^$|^https?://[^/]+$", description="API server; empty: this cluster's")
    ] = ""
    discovery_token_file: Annotated[
        str, Meta(description="token for it, read at every request; empty: none")
    ] = f"{ACCOUNT}/token"
    discovery_ca_file: Annotated[
        str, Meta(description="PEM authorities of its certificate; empty: those of the system")
    ] = f"{ACCOUNT}/ca.crt"
    discovery_max_workers: Annotated[
        int, Meta(ge=1, le=65_536, description="engines followed; beyond, by name, none is added")
    ] = 1024
    discovery_unready_s: Annotated[
        float, Meta(ge=0, description="one that is not ready for so long is forgotten")
    ] = 10.0
    discovery_timeout_s: Annotated[
        float, Meta(gt=0, le=60, description="for the API server to answer")
    ] = 10.0
