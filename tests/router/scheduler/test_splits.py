"""Splits of routing groups: their text, and which group a request finds."""

from collections import Counter

import pytest

from router.errors import ConfigError
from router.protocol.requests import PromptRequest, SelectRequest
from router.protocol.values import Scope
from router.scheduler.splits import (
    KEY_TOKENS,
    chosen_group,
    parsed_splits,
    split_from,
    split_key,
    weights_of,
)


def shares(weights, keys):
    counts = Counter(chosen_group(weights, weights, key) for key in keys)
    return {group: counts[group] / len(keys) for group in weights}


KEYS = [f"session {number}".encode() for number in range(4_000)]


def test_splits_are_rows_by_group_and_model():
    splits = parsed_splits("default=blue:90+green:10, default@a/b=default:1+c:0.5")
    assert weights_of(splits, Scope("m", "default")) == {"blue": 90, "green": 10}
    assert weights_of(splits, Scope("a/b", "default")) == {"default": 1, "c": 0.5}
    assert weights_of(splits, Scope("m", "blue")) is None
    assert split_from(splits, Scope("m", "blue")) == ["default"]
    assert split_from(splits, Scope("a/b", "blue")) == []
    assert split_from(splits, Scope("a/b", "default")) == []
    assert parsed_splits("") == {}


@pytest.mark.parametrize(
    "text",
    [
        "default",
        "=a:1",
        "d=a",
        "d=a:x",
        "d=a:-1",
        "d=a:1+a:2",
        "d=a:0",
        "d@=a:1",
        "d=:1",
        "d=a:nan",
    ],
)
def test_text_that_is_no_split_is_refused(text):
    with pytest.raises(ConfigError, match="group_splits"):
        parsed_splits(text)


def test_a_group_is_split_once():
    with pytest.raises(ConfigError, match="'d' is named twice"):
        parsed_splits("d=a:1,d=b:1")


def test_groups_get_their_shares():
    found = shares({"blue": 90.0, "green": 10.0, "none": 0.0}, KEYS)
    assert found["green"] == pytest.approx(0.1, abs=0.02)
    assert found["none"] == 0


def test_changed_weights_move_no_more_requests_than_they_have_to():
    before, after = {"blue": 90.0, "green": 10.0}, {"blue": 80.0, "green": 20.0}
    moved = [(chosen_group(before, before, key), chosen_group(after, after, key)) for key in KEYS]
    assert ("green", "blue") not in moved
    assert moved.count(("blue", "green")) / len(KEYS) == pytest.approx(0.1, abs=0.02)


def test_a_session_or_the_beginning_of_a_prompt_is_the_key():
    long = list(range(KEY_TOKENS + 1))
    assert split_key(SelectRequest(token_ids=[1], session_id="s")) == ("session", b"s")
    assert split_key(PromptRequest(token_ids=long)) == split_key(PromptRequest(token_ids=long[:-1]))
    assert split_key(PromptRequest(token_ids=[1])) != split_key(PromptRequest(token_ids=[2]))
    hashed = PromptRequest(sequence_hashes=[1, 2], isl_tokens=40)
    assert split_key(hashed) != split_key(PromptRequest(sequence_hashes=[3], isl_tokens=40))
