"""Words that spaces separate have the tokens that the library makes of the whole text."""

from functools import cache, partial
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from router.forward.tokenizer.files import TokenizerFiles
from router.forward.tokenizer.local import LocalTokenizer
from router.forward.tokenizer.token_cache import TokenCache
from router.forward.tokenizer.words import WordTokens, keeps_words_apart
from support.chaos.fuzzing import examples
from support.engines.trained import MAKES, ODD_TOKENS, SPECIAL, TEXT, byte_level

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA_3.replace("{1,3}", "")
GPT_OSS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def splitting(pattern, normalizer=None):
    """A tokenizer as newer models have it: an expression of its own, then bytes."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


MAKE_BY_NAME = {
    "gpt2": byte_level,
    "llama3": partial(splitting, LLAMA_3),
    "qwen": partial(splitting, QWEN, normalizers.NFC()),
    "gpt-oss": partial(splitting, GPT_OSS),
    "odd": partial(byte_level, ODD_TOKENS),
}


@cache
def tokenizer_of(name):
    """Not while tests are collected: training starts threads."""
    return MAKE_BY_NAME[name]()


def local(tokenizer, **seams):
    files = TokenizerFiles(str(Path(__file__)), tokenizer.to_str(), {}, {}, [])
    return LocalTokenizer(files, TokenCache(0), **seams)


def are_apart(tokenizer):
    cutter = tokenizer.pre_tokenizer
    return keeps_words_apart(
        tokenizer.to_str(),
        lambda text: [text[slice(*span)] for _, span in cutter.pre_tokenize_str(text)],
    )


@cache
def local_of(name):
    return local(tokenizer_of(name))


ODD = [*SPECIAL, *(token.content for token in ODD_TOKENS)]
BITS = st.sampled_from(
    [
        *ODD,
        *("the quick", "Brown FOX", "'s", "'LL", "don't", "1234567", "x**2", " ", "  ", "\n"),
        *("\r\n", "\t", "\x0b", "\x1c", "\x1f", "\x7f", "\x00", "_", ")(", "/", "ß", "日本", "²"),
        *("\u00a0", "\u2028", "\u3000", "e\u0301", "\u0301", "\U0001f469\u200d", "Ⅷ", "ﬁ", " \n "),
    ]
)
SOME = st.text(st.characters(max_codepoint=0x3100), max_size=8) | st.text(max_size=4)
TEXTS = st.lists(BITS | st.just(" ") | SOME, max_size=12)


@pytest.mark.parametrize("name", MAKE_BY_NAME)
@settings(max_examples=examples(150))
@given(text=TEXTS.map("".join))
@example(text="a" * 200 + " " + "b1" * 100)
def test_words_have_the_tokens_of_the_text(name, text):
    expected = tokenizer_of(name).encode(text, add_special_tokens=False).ids
    assert local_of(name).text_tokens(text) == expected
    assert local_of(name).text_tokens(text) == expected


@pytest.mark.parametrize("name", MAKE_BY_NAME)
def test_models_with_expressions_keep_words_apart(name):
    assert are_apart(tokenizer_of(name))


@pytest.mark.parametrize(
    "make",
    [
        *(make for make in MAKES if make is not byte_level),
        partial(splitting, r"\w+ \w+|\s+|."),
        partial(splitting, r"\w+(?= \d)|\S+|\s+"),
        partial(splitting, r"\s+|\S+"),
        partial(splitting, LLAMA_3, normalizers.Lowercase()),
    ],
)
def test_tokenizers_that_join_or_look_beyond_spaces_are_left_to_the_library(make):
    assert not are_apart(make())


def test_known_words_are_bounded_and_not_made_again():
    made = []

    def encode(several):
        made.extend(several)
        return [[len(each)] for each in several]

    known = WordTokens(None, encode)
    assert known.tokens("one two two").tolist() == [3, 4, 4]
    assert known.tokens("one two  two").tolist() == [3, 5, 4]
    assert known.tokens("two one").tolist() == [3, 4]
    assert known.tokens("").tolist() == []
    assert made == [" two", "one", " two ", " one", "two"]
    for number in range(3):
        known.tokens(" ".join(f"w{number * 40_000 + n}" for n in range(40_000)))
    made.clear()
    assert known.tokens("one two").tolist() == [3, 4]
    assert made == [" two"]
    made.clear()
    long = "x" * 1000
    for _ in range(2):
        known.tokens(f"one {long}")
    assert made == [f" {long}"] * 2
