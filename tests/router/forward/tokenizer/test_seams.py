"""Texts in pieces have the tokens of the whole, whatever the tokenizer."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.forward.tokenizer.local import AddedToken, SplitPoints
from support.chaos.fuzzing import examples
from support.engines.trained import MAKES, ODD_TOKENS, SPECIAL

BITS = [
    *SPECIAL,
    *(token.content for token in ODD_TOKENS),
    *("<|im_end", "|>", "<", ">", " ", "\n", "\t", "  \n", "a", "word", "fox", "ß", "ﬁ", "日本"),
    *("the quick brown fox", "Quick", "1234", "é", "e\u0301", "x", "\u200b", "\u2581"),
]
TEXTS = st.lists(st.sampled_from(BITS), max_size=25).map("".join)
MAKE_BY_NAME = {make.__name__: make for make in MAKES}


@cache
def trained(name):
    """Not while tests are collected: training starts threads."""
    return MAKE_BY_NAME[name](ODD_TOKENS)


def seams(tokenizer, least):
    return SplitPoints(
        (
            AddedToken(
                "" if token.normalized else token.content,
                not (token.lstrip or token.rstrip or token.single_word),
            )
            for token in tokenizer.get_added_tokens_decoder().values()
        ),
        least,
    )


@pytest.mark.parametrize("name", MAKE_BY_NAME)
@settings(max_examples=examples(100))
@given(text=TEXTS, least=st.integers(1, 12))
def test_pieces_have_the_tokens_of_the_whole(name, text, least):
    tokenizer, together = trained(name), []
    pieces = list(seams(tokenizer, least).pieces(text))
    assert "".join(piece for _, piece in pieces) == text
    for before, piece in pieces:
        tokens = tokenizer.encode(before + piece, add_special_tokens=False).ids
        together += tokens[1:] if before else tokens
    assert together == tokenizer.encode(text, add_special_tokens=False).ids


@given(TEXTS, TEXTS)
def test_a_text_that_grows_is_cut_where_it_was(text, more):
    cutter = seams(trained("byte_level"), 5)
    short, long = list(cutter.pieces(text)), list(cutter.pieces(text + "a" + more))
    assert long[: len(short) - 1] == short[:-1]


def test_without_tokens_there_are_no_seams():
    assert list(SplitPoints([], 1).pieces("a<b>c")) == [("", "a<b>c")]
    assert list(SplitPoints([AddedToken("<b>", False)], 1).pieces("a<b>c")) == [("", "a<b>c")]
    assert list(SplitPoints([AddedToken("<b>", True)], 1).pieces("a<b>c")) == [
        ("", "a<b>"),
        ("<b>", "c"),
    ]


def test_thousands_of_tokens_are_found():
    several = SplitPoints([AddedToken(f"<unused{n}>", True) for n in range(6000)], 1)
    text = "".join(f"a<unused{n}>b" for n in range(0, 6001, 50))
    assert len(list(several.pieces(text))) == 120 + 1
