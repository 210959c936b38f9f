"""What a normaliser knows, as bytes."""

import pytest

from router.protocol.values import SCHEME, Doubt, Identity, Tier
from router.publisher.errors import NormalizerStateError
from router.publisher.normalizer.settings import NormalizerLimits
from router.publisher.normalizer.state import decode_state
from support.engines.engines import IDENTITY, Edge, placeholder, removed, stored

TOKENS = list(range(400))


def restarted(edge, now_s=100.0, **fields):
    other = Edge(**fields)
    other.normalizer.load(b"".join(edge.normalizer.save()), now_s)
    other.normalizer.check_invariants()
    return other


def test_restored_normalizer_continues():
    edge = Edge().feed(
        stored([1, 2, 3], TOKENS[:12], cache_salt="s"),
        stored([1], TOKENS[:4], cache_salt="s"),
        placeholder([2, 3], medium="DISK"),
        stored([8], TOKENS[4:8], 7, extra_keys=[[["x" * 9, 2]]]),
        stored([1], TOKENS, group=1, spec_kind="mamba"),
        removed([3]),
    )
    other = restarted(edge)
    assert other.normalizer.stats == edge.normalizer.stats
    assert other.journal.state == edge.journal.state
    assert other.doubts == Doubt.ORPHANS | Doubt.HYBRID
    for each in (edge, other):
        each.feed(removed([1, 2]), stored([4], TOKENS[12:16], 3), stored([7], TOKENS[:4]))
        each.feed(placeholder([3, 8]))
    assert all(other.held(tier) == edge.held(tier) for tier in Tier)
    assert other.normalizer.stats == edge.normalizer.stats


def test_children_wait_anew_for_their_parents():
    edge = Edge().feed(stored([2], TOKENS[4:8], 1))
    other = restarted(edge, now_s=500.0)
    other.normalizer.tick(501.9)
    assert other.normalizer.stats.waiting_blocks == 1
    other.normalizer.tick(502.0)
    assert other.normalizer.stats.waiting_blocks == 0
    assert other.counts.given_up == 1


def test_a_whole_forest_comes_back_with_its_holes():
    edge = Edge()
    for root in range(40):
        hashes = [root * 100 + n for n in range(60)]
        tokens = [root, *range(4 * 60 - 1)]
        edge.feed(stored(hashes, tokens), removed(hashes[root::7]))
    other = restarted(edge)
    assert other.journal.state == edge.journal.state
    assert other.journal.state.holes[0] > 0


DAMAGES = [
    (lambda saved: saved[:9], "not a saved state"),
    (lambda saved: b"KVRX" + saved[4:], "not a saved state"),
    (lambda saved: saved[:4] + b"\3" + saved[5:], "version 3"),
    (lambda saved: saved[:-1], "bytes of"),
    (lambda saved: saved[:-1] + bytes([saved[-1] ^ 1]), "checksum"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_damaged_bytes_are_refused_and_change_nothing(damage, reason):
    saved = Edge().feed(stored([1], TOKENS[:4])).normalizer.save()
    saved = b"".join(saved)
    edge = Edge()
    with pytest.raises(NormalizerStateError, match=reason):
        edge.normalizer.load(damage(saved), 0.0)
    assert edge.feed().held() == set()


def test_a_state_of_another_identity_is_refused():
    with pytest.raises(NormalizerStateError, match="allowed"):
        decode_state(b"".join(Edge().normalizer.save()), Identity(SCHEME, 8))
    assert decode_state(b"".join(Edge().normalizer.save()), IDENTITY).identity == IDENTITY


def test_more_contexts_than_are_allowed_now_are_refused():
    saved = Edge().feed(*(stored([n], TOKENS[:4], cache_salt=str(n)) for n in range(5)))
    with pytest.raises(NormalizerStateError, match="contexts"):
        restarted(saved, limits=NormalizerLimits(contexts=2))
