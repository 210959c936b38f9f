"""The tokenizer and the chat template of the engine whose requests were recorded."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from router.forward.tokenizer.files import TokenizerFiles
from router.forward.tokenizer.local import LocalTokenizer
from router.forward.tokenizer.token_cache import TokenCache

FOLDER = Path(__file__).parents[2] / "vectors/vllm_http"
RECORDED = json.loads((FOLDER / "prompts.json").read_text())
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image|>"]
ADDED = ["<tool_call>", "</tool_call>", "<think>", "</think>"]


def recorded_files():
    """A token is a byte; 256 and above are the added tokens."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(ADDED)
    templates = {"default": RECORDED["chat_template"]}
    return TokenizerFiles("recorded", tokenizer.to_str(), templates, {}, [])


def write_recorded(folder):
    """The same in files."""
    files = recorded_files()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(files.tokenizer)
    (folder / "chat_template.jinja").write_text(files.templates["default"])
    return folder


def recorded_tokenizer():
    return LocalTokenizer(recorded_files(), TokenCache(100_000))
