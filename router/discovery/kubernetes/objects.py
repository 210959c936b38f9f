"""The fields of Kubernetes objects that discovery reads; others are ignored."""

from typing import TypeAlias

from msgspec import Raw, Struct, field


class Metadata(Struct, frozen=True, rename="camel"):
    """Metadata of any object.

    `deletion_timestamp`: set once the object is terminating.
    """

    name: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    annotations: dict[str, str] = {}


class Condition(Struct, frozen=True):
    """A condition of a pod."""

    type: str = ""
    status: str = ""


class PodStatus(Struct, frozen=True):
    """The status of a pod."""

    phase: str = ""
    pod_ip: str = field(default="", name="podIP")
    conditions: list[Condition] = []


class Pod(Struct, frozen=True):
    """A pod."""

    metadata: Metadata
    status: PodStatus = PodStatus()


class EndpointConditions(Struct, frozen=True):
    """Conditions of an endpoint; absent ones count as true, except `terminating`."""

    ready: bool | None = None
    terminating: bool | None = None


class Target(Struct, frozen=True):
    """The object that an endpoint belongs to."""

    name: str = ""


class Endpoint(Struct, frozen=True, rename="camel"):
    """An endpoint of a slice."""

    addresses: list[str] = []
    conditions: EndpointConditions = EndpointConditions()
    target_ref: Target | None = None


class EndpointSlice(Struct, frozen=True):
    """A part of a service's endpoints."""

    metadata: Metadata
    endpoints: list[Endpoint] | None = None


ClusterObject: TypeAlias = Pod | EndpointSlice


class ListMetadata(Struct, frozen=True, rename="camel"):
    """Metadata of a page of a list.

    `continue_`: the token of the next page; empty on the last page.
    """

    resource_version: str = ""
    continue_: str = field(default="", name="continue")


class Page(Struct, frozen=True):
    """A page of a list."""

    metadata: ListMetadata
    items: list[Raw] = []


class Change(Struct, frozen=True):
    """A line of a watch; if `type` is ERROR, its object is a status."""

    type: str
    object: Raw


class Status(Struct, frozen=True):
    """The reason why a request or a watch failed."""

    code: int = 0
    message: str = ""
