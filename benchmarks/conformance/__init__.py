"""Peers of the conformance kit (`router/tools/conformance`), and their environments."""

from router.tools.conformance.systems.base import System
from router.tools.conformance.systems.kv_router import KvRouter

from .dynamo import DynamoSelectService
from .dynamo_runtime import DynamoRuntime
from .vllm_router import VllmRouter

SYSTEMS: dict[str, type[System]] = {
    "ours": KvRouter,
    "dynamo": DynamoSelectService,
    "dynamo-runtime": DynamoRuntime,
    "vllm-router": VllmRouter,
}
