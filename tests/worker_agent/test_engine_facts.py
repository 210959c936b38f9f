"""What was set against what the engine says."""

import pytest

from router.errors import ConfigError
from router.publisher.metrics_dialects import EngineFacts
from worker_agent.engine_facts import (
    LearnedFacts,
    SettledFacts,
    differences,
    merged,
    settle,
    unknown,
)

TOLD = EngineFacts("tiny", 16, 1000, 8192)


def test_what_is_not_given_is_learned():
    assert settle(EngineFacts(), TOLD) == SettledFacts("tiny", 16, 1000, 8192)
    assert settle(EngineFacts("m", 16, 1000, 8192), EngineFacts()) == SettledFacts(
        "m", 16, 1000, 8192
    )
    assert settle(EngineFacts("m"), TOLD).model_name == "m"


def test_what_nobody_knows_is_awaited_or_assumed():
    assert settle(EngineFacts(), EngineFacts("tiny", 16)) is None
    assert list(unknown(EngineFacts(), EngineFacts("tiny", 16))) == ["total_kv_blocks"]
    assert settle(EngineFacts(), EngineFacts(None, 16, 5)) == SettledFacts("default", 16, 5, 2048)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (EngineFacts(block_size=32), "block_size: 32 was set, and the engine says 16"),
        (EngineFacts(total_kv_blocks=9), "total_kv_blocks: 9 was set, and the engine says 1000"),
        (EngineFacts(max_num_batched_tokens=1), "1 was set, and the engine says 8192"),
    ],
)
def test_a_disagreement_names_both(given, words):
    with pytest.raises(ConfigError, match=words):
        settle(given, TOLD)


def test_another_engine_is_told_by_what_it_says():
    assert list(differences(TOLD, EngineFacts("tiny", None, 1000, 8192))) == []
    assert list(differences(EngineFacts(), TOLD)) == []
    assert list(differences(TOLD, EngineFacts("other", 32))) == [
        "model_name tiny is now other",
        "block_size 16 is now 32",
    ]


def test_what_is_not_said_any_more_is_remembered():
    assert merged(TOLD, EngineFacts(total_kv_blocks=7)) == EngineFacts("tiny", 16, 7, 8192)


def test_an_engine_is_the_same_until_it_says_other_things():
    facts = LearnedFacts(EngineFacts(block_size=16))
    assert (facts.settled(), facts.unknown(), facts.model_name) == (
        None,
        ["total_kv_blocks"],
        "default",
    )
    assert facts.hear(TOLD) == ""
    assert facts.settled() == SettledFacts("tiny", 16, 1000, 8192)
    assert facts.hear(EngineFacts("tiny")) == ""
    assert facts.told == TOLD
    assert facts.hear(EngineFacts("other", 16)) == "model_name tiny is now other"
    assert (facts.told, facts.settled()) == (EngineFacts("other", 16), None)


def test_a_model_that_was_named_must_not_become_another():
    facts = LearnedFacts(EngineFacts("alias"))
    facts.hear(TOLD)
    assert facts.settled().model_name == "alias"
    facts.hear(EngineFacts("other", 16, 1000))
    with pytest.raises(ConfigError, match="alias was set when the engine served tiny; now it is o"):
        facts.settled()
