"""Small tokenizers of every make, trained on the spot."""

import json

from tokenizers import (
    AddedToken,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 3,
    "Prefixes are for caches; caches are for prefixes: 123, 1234, 12345.",
    "def f(x):\n    return x + 1\n\n\nÄöü ß. Ж и ж. 日本語のテキスト。",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def _trained(tokenizer, trainer, more=()):
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(list(more))
    return tokenizer


def byte_level(more=()):
    """As GPT-2, Qwen and Llama 3 have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False, special_tokens=SPECIAL
    )
    return _trained(tokenizer, trainer, more)


def sentence_pieces(more=()):
    """As Llama 2, Mistral and Gemma have it: the first word of a text is special."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"]
    )
    tokenizer = _trained(tokenizer, trainer, more)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def prepending(more=()):
    """As older conversions of Llama 2 have it: each part gets a space in front."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"]
    )
    return _trained(tokenizer, trainer, more)


def unigram(more=()):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=120, unk_token="<unk>", show_progress=False, special_tokens=["<unk>"]
    )
    return _trained(tokenizer, trainer, more)


MAKES = (byte_level, sentence_pieces, prepending, unigram)

ODD_TOKENS = (
    AddedToken("<left>", lstrip=True),
    AddedToken("<right>", rstrip=True),
    AddedToken("<right>x", rstrip=True, normalized=False),
    AddedToken("word", single_word=True),
    AddedToken("<|im", normalized=False),
    AddedToken("<|im_end|>>", normalized=False),
    AddedToken("  ", normalized=False),
    AddedToken(" <a>", normalized=False),
    AddedToken("<a>", normalized=False, single_word=True),
    AddedToken("end|>", normalized=False),
    AddedToken("Quick", normalized=True),
)
"""Of every flag; some are part of others."""


def write_tokenizer(folder, tokenizer, **config):
    """As `transformers` would save it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
