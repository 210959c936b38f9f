"""What a core needs to know of the configuration."""

from collections.abc import Mapping

from msgspec import Struct

from router.fleet import LivenessLimits
from router.indexer.approximate import ApproximateLimits
from router.indexer.base import IndexMode
from router.scheduler.gate import GateSettings
from router.scheduler.policies import DEFAULT_POLICY, NO_GROUPS
from router.scheduler.settings import PolicySettings
from router.scheduler.waiting_room import Queueing
from router.sequence.naming import PLAIN, BlockNaming
from router.sequence.tracking import Tracking


class CoreSettings(Struct, frozen=True):
    """Each part is documented where it is used."""

    router_id: int
    policy: PolicySettings
    liveness: LivenessLimits
    reservation_ttl_s: float
    max_reservations: int
    mode: IndexMode = IndexMode.EVENTS
    prediction: ApproximateLimits | None = None
    tracking: Tracking = Tracking()
    gate: GateSettings = GateSettings()
    default_policy: str = DEFAULT_POLICY
    group_policies: Mapping[str, str] = NO_GROUPS
    queueing: Queueing = Queueing()
    models_prefill: bool = False
    naming: BlockNaming = PLAIN
