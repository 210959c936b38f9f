"""The reference engine's tokenizer as a folder, for `kv-router forward --tokenizer`: a token is a
byte, and a chat is written as `<role>text`, line by line.
"""

from importlib.util import find_spec
from pathlib import Path

import msgspec

_TEMPLATE = """\
{%- for message in messages %}
    {{- '<' + message.role + '>' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}{{- part.text }}{% endfor %}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}{% endif %}"""


def write_tokenizer(folder: Path) -> bool:
    """Write it; False where the packages are missing that read it."""
    if not (find_spec("tokenizers") and find_spec("jinja2")):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(msgspec.json.encode(_tokenizer()))
    config = {"chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
    return True


def _tokenizer() -> dict[str, object]:
    spelling = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    letters = {letter: byte for byte, letter in enumerate(_letters())}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {**spelling, "trim_offsets": True},
        "decoder": {**spelling, "trim_offsets": True},
        "model": {"type": "BPE", "vocab": letters, "merges": []},
    }


def _letters() -> list[str]:
    """How `tokenizers` spells each byte: as itself where that can be seen, others from U+0100."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]
