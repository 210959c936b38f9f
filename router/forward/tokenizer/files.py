"""A model's tokenizer as it lies in a folder: `tokenizer.json`, and what is said beside it.

tokenizer.json          the tokenizer
tokenizer_config.json   special tokens, and the chat template
chat_template.jinja     the same template, in a file of its own: this one counts
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from router.forward.tokenizer.errors import TokenizerFilesError

LIMIT_BYTES = 256 * 1024 * 1024
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MORE = ("additional_special_tokens", "extra_special_tokens")
_FOLDER = "a folder with tokenizer.json, or such a file"


class ExtraToken(Struct, frozen=True):
    """A special token that is told beside the tokenizer, and may be unknown to it."""

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False
    special: bool = True


class TokenizerFiles(Struct, frozen=True):
    """What is in them. `templates`: by name, "default" and "tool_use"; `special_tokens`: what a
    template knows them by.
    """

    path: str
    tokenizer: str
    templates: dict[str, str]
    special_tokens: dict[str, str]
    extra_tokens: list[ExtraToken]


class _Named(Struct, frozen=True):
    name: str
    template: str


def read_files(path: str) -> TokenizerFiles:
    """From a folder, or a tokenizer's file and what lies beside it. Raises TokenizerFilesError."""
    place = Path(path)
    file = place / "tokenizer.json" if place.is_dir() else place
    folder = file.parent
    config = _config(folder / "tokenizer_config.json")
    special_tokens = _config(folder / "special_tokens_map.json") | config
    template = folder / "chat_template.jinja"
    templates = _templates(config, folder / "tokenizer_config.json")
    if template.is_file():
        templates = {**templates, "default": _text(template)}
    named = {name: said for name in NAMED if (said := _content(special_tokens.get(name)))}
    extra = list(_extra(special_tokens))
    return TokenizerFiles(str(file), _text(file), templates, named, extra)


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(_text(path), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise TokenizerFilesError(str(path), str(error), "an object of JSON") from error


def _templates(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """One, or several of names."""
    said = config.get("chat_template")
    if said is None:
        return {}
    try:
        several = msgspec.convert(said, str | list[_Named])
    except msgspec.ValidationError as error:
        reason = f"chat_template: {error}"
        raise TokenizerFilesError(str(path), reason, "a template, or a list of them") from error
    if isinstance(several, str):
        return {"default": several}
    return {each.name: each.template for each in several}


def _extra(config: Mapping[str, Any]) -> Iterator[ExtraToken]:
    several = [config.get(name) for name in NAMED]
    for name in _MORE:
        more = config.get(name)
        several += more if isinstance(more, list) else ()
    decoder = config.get("added_tokens_decoder")
    several += decoder.values() if isinstance(decoder, dict) else ()
    for said in several:
        if isinstance(said, str):
            yield ExtraToken(said)
        elif isinstance(said, dict) and isinstance(said.get("content"), str):
            yield msgspec.convert(said, ExtraToken)


def _content(said: Any) -> str | None:
    content = said.get("content") if isinstance(said, dict) else said
    return content if isinstance(content, str) else None


def _text(path: Path) -> str:
    try:
        size_bytes = path.stat().st_size
        if size_bytes > LIMIT_BYTES:
            reason = f"{size_bytes} bytes"
            raise TokenizerFilesError(str(path), reason, f"up to {LIMIT_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TokenizerFilesError(str(path), error.strerror or str(error), _FOLDER) from error
    except UnicodeDecodeError as error:
        raise TokenizerFilesError(str(path), "not UTF-8", "a text file") from error
