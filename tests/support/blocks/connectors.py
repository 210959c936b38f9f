"""Slots over real pools: what tests of the connector begin with."""

from router.protocol.values import Tier
from router.sequence.hashing.tokens import TokenBlockSequence, request_families
from worker_agent.blocks.eviction.simple import LruEviction
from worker_agent.blocks.names import Naming
from worker_agent.blocks.pool import BlockPool
from worker_agent.connector.slots.block_groups import BlockGroup, BlockGroups
from worker_agent.connector.slots.held_prefix import LowerTier
from worker_agent.connector.slots.protocol import Completion
from worker_agent.connector.slots.slot_manager import SlotManager
from worker_agent.connector.slots.slot_table import SlotState

BLOCK_SIZE = 4
NAMING = Naming(b"s" * 16, "tiny")


def names_of(tokens, **tenant):
    """What the full blocks of these tokens are called."""
    sequence = TokenBlockSequence(tokens, BLOCK_SIZE, request_families(**tenant))
    root = NAMING.root(tenant.get("lora_name"), tenant.get("cache_salt"))
    return NAMING.named(sequence.blocks, root)


def keep(pool, names):
    """The pool has these from now on, unused."""
    pool.release(pool.register(pool.allocate(len(names)), names))


def lower_tiers(host_blocks=8, disk_blocks=8):
    """An empty host tier, and an empty disk tier."""
    return [
        LowerTier(tier, BlockPool(blocks, LruEviction()))
        for tier, blocks in ((Tier.HOST, host_blocks), (Tier.DISK, disk_blocks))
    ]


def one_group(block_size=BLOCK_SIZE):
    """The groups of a model with one kind of attention."""
    return BlockGroups([BlockGroup(block_size)])


def groups_of(layout):
    """The groups of a hybrid model: (block size, window) of each."""
    if len(layout) == 1:
        return BlockGroups([BlockGroup(*layout[0])])
    return BlockGroups([BlockGroup(*each, b"%d" % i) for i, each in enumerate(layout)])


def manager_over(tiers=(), **options):
    return SlotManager(one_group(), NAMING, tiers, **options)


def settle_all(slot, errors=None):
    """The worker gets everything, and answers."""
    slot.take_pending_operations()
    for operation in slot.under_way:
        assert slot.settle(Completion(operation.uuid, errors or {}))


def in_state(manager, state, tokens=range(1, 11)):
    """Slot "r" of ten tokens in this state: `Onboarding` has loads under way, `Finishing` a store.

    The tiers must have blocks of the prompt, where the state needs them.
    """
    slot = manager.create_slot("r", list(tokens))
    if state in {SlotState.ONBOARD_STAGED, SlotState.ONBOARDING}:
        slot.acquire_all_local_matches(0)
    if state is not SlotState.INITIALIZED:
        slot.append_mutable_device_blocks([[10, 11, 12]])
    if state in _WAYS:
        _WAYS[state](slot)
    slot.take_pending_operations()
    assert slot.state is state
    return slot


def _decode(slot):
    slot.mark_as_prefilling(1)
    slot.mark_as_decoding(2)


def _skip(slot):
    slot.mark_as_prefilling(1)
    slot.mark_as_not_scheduled(2)


def _finish_storing(slot):
    slot.schedule(1, 0, 8)
    slot.take_pending_operations()
    slot.mark_as_finished(2, 0.0)


_WAYS = {
    SlotState.ONBOARDING: lambda slot: slot.mark_as_onboarding(1, 0.0),
    SlotState.NOT_SCHEDULED: _skip,
    SlotState.PREFILLING: lambda slot: slot.mark_as_prefilling(1),
    SlotState.DECODING: _decode,
    SlotState.FINISHING: _finish_storing,
    SlotState.FINISHED: lambda slot: slot.mark_as_finished(1, 0.0),
}
