"""A model's tokenizer files in a folder: `tokenizer.json`, and the files beside it.

tokenizer.json          the tokenizer
tokenizer_config.json   special tokens, and the chat template
chat_template.jinja     the chat template in its own file, which takes precedence
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from router.forward.tokenizer.errors import TokenizerFilesError
from router.protocol.values import UNREADABLE

LIMIT_BYTES = 256 * 1024 * 1024
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MORE = ("additional_special_tokens", "extra_special_tokens")
_FOLDER = "a folder with tokenizer.json, or such a file"


class ExtraToken(Struct, frozen=True):
    """A special token defined outside the tokenizer, which may lack it."""

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False
    special: bool = True


class TokenizerFiles(Struct, frozen=True):
    """The content of the files.

    `templates`: by name, "default" and "tool_use". `special_tokens`: by the names that templates
    use.
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
    """Read a folder, or a tokenizer's file and the files beside it. Raises TokenizerFilesError."""
    place = Path(path)
    file = place / "tokenizer.json" if place.is_dir() else place
    folder = file.parent
    config = _config(folder / "tokenizer_config.json")
    special_tokens = _config(folder / "special_tokens_map.json") | config
    template = folder / "chat_template.jinja"
    templates = _templates(config, folder / "tokenizer_config.json")
    if template.is_file():
        templates = {**templates, "default": _text(template)}
    named = {name: value for name in NAMED if (value := _content(special_tokens.get(name)))}
    try:
        extra = list(_extra(special_tokens))
    except msgspec.ValidationError as error:
        raise TokenizerFilesError(str(folder), f"special tokens: {error}", "tokens") from error
    return TokenizerFiles(str(file), _text(file), templates, named, extra)


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(_text(path), type=dict[str, Any])
    except UNREADABLE as error:
        raise TokenizerFilesError(str(path), str(error), "an object of JSON") from error


def _templates(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return the templates by name; a single one is the default."""
    value = config.get("chat_template")
    if value is None:
        return {}
    try:
        several = msgspec.convert(value, str | list[_Named])
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
    for value in several:
        if isinstance(value, str):
            yield ExtraToken(value)
        elif isinstance(value, dict) and isinstance(value.get("content"), str):
            yield msgspec.convert(value, ExtraToken)


def _content(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
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
