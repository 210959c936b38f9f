"""The systems that can be scored; another one is a class here (see ../../README.md)."""

from .base import System
from .dynamo import DynamoSelectService
from .ours import KvRouter
from .vllm_router import VllmRouter

SYSTEMS: dict[str, type[System]] = {
    "ours": KvRouter,
    "dynamo": DynamoSelectService,
    "vllm-router": VllmRouter,
}
