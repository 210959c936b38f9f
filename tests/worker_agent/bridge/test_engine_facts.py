"""What was set against what the engine says."""

import pytest

from router.errors import ConfigError
from router.publisher.engine_metrics.dialects import EngineLimits
from worker_agent.bridge.engine_facts import (
    LearnedFacts,
    ReconciledFacts,
    differences,
    merged,
    reconcile,
    unknown,
)

TOLD = EngineLimits("tiny", 16, 1000, 8192)


def test_missing_limits_are_learned():
    assert reconcile(EngineLimits(), TOLD) == ReconciledFacts("tiny", 16, 1000, 8192)
    assert reconcile(EngineLimits("m", 16, 1000, 8192), EngineLimits()) == ReconciledFacts(
        "m", 16, 1000, 8192
    )
    assert reconcile(EngineLimits("m"), TOLD).model_name == "m"


def test_missing_limits_are_awaited_or_assumed():
    assert reconcile(EngineLimits(), EngineLimits("tiny", 16)) is None
    assert list(unknown(EngineLimits(), EngineLimits("tiny", 16))) == ["total_kv_blocks"]
    assert reconcile(EngineLimits(), EngineLimits(None, 16, 5)) == ReconciledFacts(
        "default", 16, 5, 2048
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (EngineLimits(block_size=32), "block_size: 32 was set, but the engine reports 16"),
        (
            EngineLimits(total_kv_blocks=9),
            "total_kv_blocks: 9 was set, but the engine reports 1000",
        ),
        (EngineLimits(max_num_batched_tokens=1), "1 was set, but the engine reports 8192"),
    ],
)
def test_a_disagreement_names_both(given, words):
    with pytest.raises(ConfigError, match=words):
        reconcile(given, TOLD)


def test_changed_limits_reveal_another_engine():
    assert list(differences(TOLD, EngineLimits("tiny", None, 1000, 8192))) == []
    assert list(differences(EngineLimits(), TOLD)) == []
    assert list(differences(TOLD, EngineLimits("other", 32))) == [
        "model_name tiny is now other",
        "block_size 16 is now 32",
    ]


def test_limits_no_longer_reported_are_kept():
    assert merged(TOLD, EngineLimits(total_kv_blocks=7)) == EngineLimits("tiny", 16, 7, 8192)


def test_an_engine_is_the_same_until_it_says_other_things():
    facts = LearnedFacts(EngineLimits(block_size=16))
    assert (facts.settled(), facts.unknown(), facts.model_name) == (
        None,
        ["total_kv_blocks"],
        "default",
    )
    assert facts.record(TOLD) == ""
    assert facts.settled() == ReconciledFacts("tiny", 16, 1000, 8192)
    assert facts.record(EngineLimits("tiny")) == ""
    assert facts.reported == TOLD
    assert facts.record(EngineLimits("other", 16)) == "model_name tiny is now other"
    assert (facts.reported, facts.settled()) == (EngineLimits("other", 16), None)


def test_a_model_that_was_named_must_not_become_another():
    facts = LearnedFacts(EngineLimits("alias"))
    facts.record(TOLD)
    assert facts.settled().model_name == "alias"
    facts.record(EngineLimits("other", 16, 1000))
    with pytest.raises(ConfigError, match="alias was set when the engine served tiny; now it is o"):
        facts.settled()
