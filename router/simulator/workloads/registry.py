"""All synthetic workloads, by the names that users give."""

from collections.abc import Mapping
from types import MappingProxyType

from router.simulator.workloads.agentic_code import AgenticCode
from router.simulator.workloads.chat_users import ChatUsers
from router.simulator.workloads.contexts import Workload
from router.simulator.workloads.rollouts import Rollouts
from router.simulator.workloads.timed import Agents, Documents, LongTail, MultiTurn, SharedPrompts

WORKLOADS: Mapping[str, type[Workload]] = MappingProxyType(
    {
        "shared-prompts": SharedPrompts,
        "multi-turn": MultiTurn,
        "agents": Agents,
        "long-tail": LongTail,
        "documents": Documents,
        "agentic-code": AgenticCode,
        "chat-users": ChatUsers,
        "rollouts": Rollouts,
    }
)
