"""The part of Kubernetes' objects that is read here; what else they have is passed over."""

from typing import TypeAlias

from msgspec import Raw, Struct, field


class Metadata(Struct, frozen=True, rename="camel"):
    """Of any object. `deletion_timestamp`: it has been told to end."""

    name: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    annotations: dict[str, str] = {}


class Condition(Struct, frozen=True):
    """Of a pod."""

    type: str = ""
    status: str = ""


class PodStatus(Struct, frozen=True):
    """How a pod is."""

    phase: str = ""
    pod_ip: str = field(default="", name="podIP")
    conditions: list[Condition] = []


class Pod(Struct, frozen=True):
    """A pod."""

    metadata: Metadata
    status: PodStatus = PodStatus()


class EndpointConditions(Struct, frozen=True):
    """Of an endpoint; what is not said counts as true, but for `terminating`."""

    ready: bool | None = None
    terminating: bool | None = None


class Target(Struct, frozen=True):
    """Whose endpoint it is."""

    name: str = ""


class Endpoint(Struct, frozen=True, rename="camel"):
    """One of a slice."""

    addresses: list[str] = []
    conditions: EndpointConditions = EndpointConditions()
    target_ref: Target | None = None


class EndpointSlice(Struct, frozen=True):
    """A part of a service's endpoints."""

    metadata: Metadata
    endpoints: list[Endpoint] | None = None


ClusterObject: TypeAlias = Pod | EndpointSlice


class ListMetadata(Struct, frozen=True, rename="camel"):
    """Of a page of a list. `continue_`: where the next one begins; empty: this is the last."""

    resource_version: str = ""
    continue_: str = field(default="", name="continue")


class Page(Struct, frozen=True):
    """A page of a list."""

    metadata: ListMetadata
    items: list[Raw] = []


class Change(Struct, frozen=True):
    """A line of a watch; its object is a status where the type is ERROR."""

    type: str
    object: Raw


class Status(Struct, frozen=True):
    """Why a request, or a watch, failed."""

    code: int = 0
    message: str = ""
