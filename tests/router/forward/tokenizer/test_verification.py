"""What is made of the answers to probes: exact, without engines."""

import pytest

from router.forward.tokenizer.probes import difference, probes
from router.forward.tokenizer.verification import KINDS, Checks, Found, ProbeVerdict

AGREES, DIFFERS, UNTOLD = (
    ProbeVerdict("agrees"),
    ProbeVerdict("differs", "why"),
    ProbeVerdict("untold"),
)


def of(verdict, model="m", **others):
    return Found(model, {**dict.fromkeys(KINDS, verdict), **others})


def test_one_difference_is_enough_and_silence_is_none():
    checks = Checks()
    assert checks.standing("m", "chat") == "unchecked"
    assert checks.believed("m") == frozenset()
    assert checks.note(1, of(UNTOLD))
    assert checks.standing("m", "chat") == "unverified"
    assert checks.note(2, of(AGREES, tools=DIFFERS))
    assert checks.standing("m", "chat") == "agrees"
    assert checks.believed("m") == frozenset(KINDS) - {"tools"}
    assert checks.note(3, of(DIFFERS))
    assert checks.believed("m") == frozenset()
    assert not checks.note(3, of(DIFFERS))
    checks.note(4, of(AGREES, "other"))
    assert checks.believed("other") == frozenset(KINDS)
    checks.keep([1, 2, 4])
    assert checks.believed("m") == frozenset(KINDS) - {"tools"}
    assert checks.counts()["m", "tools", "differs"] == 1
    assert checks.problems() == ["worker 2 of 'm': tools: why"]


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        ([1, 2], [1, 2], None),
        (None, None, None),
        (None, [1], "only the tokenizer refuses a prompt"),
        ([1], None, "only the engine refuses a prompt"),
        ([5, 6], [1, 5, 6], "only the engine begins with token 1, as a beginning-of-text"),
        ([1, 5, 6], [5, 6], "only the tokenizer begins with token 1, as a beginning-of-text"),
        ([5, 6], [5, 6, 2], "only the engine ends with token 2"),
        ([5, 6], [5, 7, 8, 9], "token 1 of 2 is 6 here, and 7 of 4 in the engine"),
        ([5], [], "only the tokenizer begins with token 5, as a beginning-of-text"),
        ([5, 6, 7], [5], "token 1 of 3 is 6 here, and None of 1 in the engine"),
    ],
)
def test_differences_are_described(ours, theirs, why):
    assert difference(ours, theirs) == why


def test_every_kind_is_probed_with_the_tokenizers_own_tokens():
    made = list(probes("m", ["<a>", "<b>"]))
    assert {each.kind for each in made} == set(KINDS)
    assert "<b>" in made[1].asked.prompt
