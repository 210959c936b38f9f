"""Two tenants: none learns from any channel what the other has asked.

The victim asks the probed prompt or another one of equal length, by lot; then the attacker probes.
If a channel told the lots apart, p would be small; one repetition is allowed, as 1 of 100 runs
raises an alarm by chance. That leaks would be found is shown by planting some.
"""

import pytest

from attack.guarded_fleet import ACCOMPLICE, ATTACKER, VICTIM
from attack.observations import TRIES
from attack.tries import EngineTries, GuessTries, RouterTries

pytestmark = [pytest.mark.attack, pytest.mark.timeout(1800)]

PLANTED_TRIES = max(100, TRIES // 5)
PROCESSES = {
    GuessTries: (),
    RouterTries: ("router", "indexer", "worker", "worker-2"),
    EngineTries: ("forwarder", "tokenizing", "router", "worker", "worker-2"),
}


def observed(kind, fleet, attacker, tries, seed):
    with kind(fleet, attacker, seed) as attack:
        return attack.run(tries, PROCESSES[kind])


@pytest.mark.parametrize("kind", [RouterTries, EngineTries, GuessTries])
def test_no_channel_shows_what_another_tenant_has_asked(fleet, kind, record_property):
    leaks = {}
    for seed in (1, 2):
        seen = observed(kind, fleet, ATTACKER, TRIES, seed)
        record_property("measured", f"{kind.__name__}: {seen.summary()}")
        found = seen.leaks()
        leaks = {name: p for name, p in found.items() if seed == 1 or name in leaks}
        if not leaks:
            return
    pytest.fail(f"these channels show what the other tenant has asked: {leaks}")


@pytest.mark.parametrize("kind", [RouterTries, EngineTries])
def test_shared_salt_is_found_in_responses_metrics_and_times(fleet, kind):
    """The salt of both tenants is the same by mistake; so these channels would show a leak."""
    leaks = observed(kind, fleet, ACCOMPLICE, PLANTED_TRIES, 3).leaks()
    expected = {
        RouterTries: {"/overlap_scores: body", "/select: body", "/select, explained: body",
                      "/dashboard/look: body", "/potential_loads: body", "/select: size",
                      "NATS overlap_scores: body", "NATS select: body"},
        EngineTries: {"completion: body", "completion: time", "chat: body", "chat: time",
                      "completion: headers", "forwarder, placement: body"},
    }  # fmt: skip
    assert sorted(expected[kind] - leaks.keys()) == []
    assert any(name.startswith("metrics of") for name in leaks)


def test_shared_ids_are_found(fleet):
    """The attacker has the victim's own token, and thus its name space."""
    leaks = observed(RouterTries, fleet, VICTIM, PLANTED_TRIES, 5).leaks()
    assert {"POST /reservations: status", "NATS mark_free: body"} <= leaks.keys()


def test_shared_cache_of_tokens_is_found_by_its_time(fleet):
    """The attacker has the victim's own token, and thus its part of the forwarder's cache."""
    leaks = observed(EngineTries, fleet, VICTIM, PLANTED_TRIES, 4).leaks()
    assert "forwarder, placement: time" in leaks
