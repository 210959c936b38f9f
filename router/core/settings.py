"""The part of the configuration that a core needs."""

from collections.abc import Mapping

from msgspec import Struct

from router.core.capacity import CapacitySettings
from router.core.fleet import LivenessLimits
from router.indexer.base import IndexMode
from router.indexer.predictions import EstimateLimits
from router.scheduler.eligibility import EligibilitySettings
from router.scheduler.queue.waiting_room import Queueing
from router.scheduler.settings import DEFAULT_POLICY, NO_GROUPS, PolicySettings
from router.sequence.active.footprint import TrackedParts
from router.sequence.hashing.keyed_hashes import PLAIN, HashKeying


class CoreSettings(Struct, frozen=True):
    """The settings of a core. Each part is documented where it is used."""

    router_id: int
    policy: PolicySettings
    liveness: LivenessLimits
    reservation_ttl_s: float
    max_reservations: int
    mode: IndexMode = IndexMode.EVENTS
    estimates: EstimateLimits = EstimateLimits()
    tracking: TrackedParts = TrackedParts()
    gate: EligibilitySettings = EligibilitySettings()
    default_policy: str = DEFAULT_POLICY
    group_policies: Mapping[str, str] = NO_GROUPS
    queueing: Queueing = Queueing()
    models_prefill: bool = False
    naming: HashKeying = PLAIN
    capacity: CapacitySettings = CapacitySettings()
