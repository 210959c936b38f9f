"""Words of texts in ASCII, found without the library, have the tokens that it makes of the text."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from router.forward.tokenizer.files import TokenizerFiles
from router.forward.tokenizer.local import LocalTokenizer, TokenCache
from router.forward.tokenizer.words import TRIED, WordTokens, word_expression
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


MADE = {
    "gpt2": byte_level(),
    "llama3": splitting(LLAMA_3),
    "qwen": splitting(QWEN, normalizers.NFC()),
    "gpt-oss": splitting(GPT_OSS),
    "odd": byte_level(ODD_TOKENS),
}


def local(tokenizer, **seams):
    files = TokenizerFiles(str(Path(__file__)), tokenizer.to_str(), {}, {}, [])
    return LocalTokenizer(files, TokenCache(0), **seams)


def expression(tokenizer):
    cutter = tokenizer.pre_tokenizer
    return word_expression(
        tokenizer.to_str(),
        lambda text: [text[slice(*span)] for _, span in cutter.pre_tokenize_str(text)],
    )


LOCAL = {name: local(tokenizer) for name, tokenizer in MADE.items()}
ODD = [*SPECIAL, *(token.content for token in ODD_TOKENS)]
BITS = st.sampled_from(
    [
        *ODD,
        *("the quick", "Brown FOX", "'s", "'LL", "don't", "1234567", "x**2", " ", "  ", "\n"),
        *("\r\n", "\t", "\x0b", "\x1c", "\x1f", "\x7f", "\x00", "_", ")(", "/", "ß", "日本", "²"),
    ]
)
TEXTS = st.lists(BITS | st.text(st.characters(max_codepoint=127), max_size=8), max_size=12)


@pytest.mark.parametrize("name", MADE)
@settings(max_examples=examples(150))
@given(text=TEXTS.map("".join))
@example(text=TRIED)
@example(text="a" * 200 + " " + "b1" * 100)
def test_words_have_the_tokens_of_the_text(name, text):
    expected = MADE[name].encode(text, add_special_tokens=False).ids
    assert LOCAL[name].text_tokens(text) == expected
    assert LOCAL[name].text_tokens(text) == expected


@pytest.mark.parametrize("name", MADE)
@given(text=TEXTS.map("".join).filter(str.isascii))
def test_words_are_those_of_the_library(name, text):
    found = expression(MADE[name]).findall(text)
    spans = MADE[name].pre_tokenizer.pre_tokenize_str(text)
    assert found == [text[slice(*span)] for _, span in spans]


@pytest.mark.parametrize(
    "tokenizer",
    [
        *(make() for make in MAKES if make is not byte_level),
        splitting(r"\p{Han}+|."),
        splitting(r"[^\s&&\p{L}]+|\s+|\p{L}+"),
        splitting(r"^a|.+$|\s+"),
        splitting(LLAMA_3, normalizers.Lowercase()),
    ],
)
def test_other_tokenizers_are_left_to_the_library(tokenizer):
    assert expression(tokenizer) is None


def test_an_expression_that_leaves_characters_out_is_not_used():
    tokenizer = splitting(r"[a-zA-Z0-9'!?_*()~;\s.:,-]+|[\x00-\x1f\x7f]")
    text = "a=b"  # the library makes a word of what no expression finds
    assert local(tokenizer).text_tokens(text) == tokenizer.encode(text).ids


def test_known_words_are_bounded_and_not_made_again():
    made = []

    def encode(several):
        made.extend(several)
        return [[len(each)] for each in several]

    known = WordTokens(expression(MADE["gpt2"]), None, encode)
    assert known.tokens("one two two").tolist() == [3, 4, 4]
    assert known.tokens("two one").tolist() == [3, 4]
    assert sorted(made) == [" one", " two", "one", "two"]
    for number in range(3):
        letters = (
            "".join(chr(97 + int(d)) for d in str(number * 40_000 + n)) for n in range(40_000)
        )
        known.tokens(" ".join(letters))
    made.clear()
    known.tokens("one")
    assert made == ["one"]
    known.tokens("x" * 1000)
    known.tokens("x" * 1000)
    assert made == ["one", *["x" * 1000] * 2]
